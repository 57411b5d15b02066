"""Settings: what is read, and how each error names its key and what would be right."""

import re

import pytest
from msgspec import field

from core.settings import (
    PluginSettings,
    SettingsError,
    WorkerSettings,
    convert_settings,
    load_settings,
    parse_settings,
    parse_workers,
    split_address,
)


def error_of(text):
    with pytest.raises(SettingsError) as raised:
        parse_settings(text)
    return str(raised.value)


def test_an_empty_file_is_the_defaults():
    settings = parse_settings("")
    assert settings.workers == []
    assert settings.routing.policies == ["round-robin"]
    assert settings.server.host == "127.0.0.1"


def test_every_section_is_read():
    settings = parse_settings(
        """
        [[workers]]
        grpc = "10.0.0.5:50051"
        http = "http://10.0.0.5:8000"
        id = "one"
        role = "decode"
        api_key_env = "KEY"
        [workers.tls]
        ca = "ca.pem"
        [server]
        port = 0
        [probe]
        interval = 1
        [gate]
        max_waiting = 5
        [routing]
        policies = ["mine", "round-robin"]
        retries = 0
        [log]
        format = "json"
        [plugins]
        enable = ["a"]
        disable = ["b"]
        [plugins.cache-salt]
        require = true
        """
    )
    [worker] = settings.workers
    assert (worker.name, worker.role, worker.tls and worker.tls.ca) == ("one", "decode", "ca.pem")
    assert (settings.server.port, settings.probe.interval, settings.gate.max_waiting, settings.routing.retries) == (0, 1.0, 5, 0)
    assert settings.plugins.enable == ["a"]
    assert settings.plugins.sections == {"cache-salt": {"require": True}}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[sever]\nport = 1", "headrace.toml: unknown key sever: did you mean 'server'?"),
        ("[server]\nprot = 1", "headrace.toml: unknown key server.prot: did you mean 'port'?"),
        ("[[workers]]\ngrcp = 'a:1'", "headrace.toml: unknown key workers[0].grcp: did you mean 'grpc'?"),
        (
            "[[workers]]\ngrpc='a:1'\n[[workers]]\ngrpc='b:1'\n[workers.tls]\ncert_file = 'x'",
            "headrace.toml: unknown key workers[1].tls.cert_file: did you mean 'cert'?",
        ),
        ("[log]\nzzz = 1", "headrace.toml: unknown key log.zzz: known are format, level"),
    ],
)
def test_an_unknown_key_is_named_with_its_place_and_the_nearest_known_one(text, expected):
    assert error_of(text) == expected


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("[server]\nport = 'x'", "headrace.toml: server.port: Expected `int`, got `str`"),
        ("[server]\nport = 70000", "headrace.toml: server.port: Expected `int` <= 65535"),
        ("[probe]\ninterval = 0", "headrace.toml: probe.interval: Expected `float` > 0"),
        ("[log]\nlevel = 'loud'", "headrace.toml: log.level: 'loud' is none; there are 'debug', 'error', 'info', 'warning'"),
        ("[[workers]]\nrole = 'x'\ngrpc = 'a:1'", "headrace.toml: workers[0].role: 'x' is none; there are 'aggregated', "),
        (
            "[[workers]]\nrole = 'prefil'\ngrpc = 'a:1'",
            "headrace.toml: workers[0].role: 'prefil' is none; "
            "there are 'aggregated', 'decode', 'encode', 'prefill'; did you mean 'prefill'?",
        ),
        ("workers = 3", "headrace.toml: workers: Expected `array`, got `int`"),
        ("[[workers]]\nid = 'x'", "headrace.toml: workers[0]: a worker needs grpc = 'host:port', http = 'http://host:port', or both"),
        ("[[workers]]\ngrpc = 'host'", "headrace.toml: workers[0]: grpc: 'host' is not host:port"),
        ("[[workers]]\nhttp = 'host:1'", "headrace.toml: workers[0]: http: 'host:1' is not a URL; write http://host:port"),
        ("[[workers]]\nhttp = 'http://'", "headrace.toml: workers[0]: http: 'http://' is not a URL; write http://host:port"),
        ("[[workers]]\nhttp = 'http://h:x'", "headrace.toml: workers[0]: http: 'http://h:x' is not a URL; write http://host:port"),
        ("[[workers]]\nhttp = 'http://h:1'\ntls = {}", "headrace.toml: workers[0]: tls: http is 'http://h:1', without TLS; write https://"),
        ("plugins = 3", "headrace.toml: plugins: Expected `object`, got `int`"),
        ("[plugins]\nenable = 'x'", "headrace.toml: plugins.enable: Expected `array`, got `str`"),
        ("[plugins]\nmine = 3", "headrace.toml: plugins.mine: this is a plugin's section, so write [plugins.mine]"),
        ("[server", "headrace.toml: "),
    ],
)
def test_a_wrong_value_is_named_with_its_place(text, start):
    assert error_of(text).startswith(start)


@pytest.mark.parametrize(
    ("address", "expected"),
    [("h:1", ("h", 1)), ("[::1]:50051", ("::1", 50051)), ("10.0.0.5:65535", ("10.0.0.5", 65535))],
)
def test_an_address_is_host_and_port(address, expected):
    assert split_address(address) == expected


@pytest.mark.parametrize("address", ["", "h", ":1", "h:", "h:0", "h:65536", "h:x", "h:-1", "h:²"])
def test_what_is_no_address_is_refused(address):
    with pytest.raises(ValueError, match="is not host:port"):
        split_address(address)


def test_the_quick_form_names_one_worker_by_its_two_servers_and_several_by_commas():
    workers = parse_workers("grpc://a:50051+http://a:8000, grpc://b:50051,https://c:8000,")
    assert workers == [
        WorkerSettings(grpc="a:50051", http="http://a:8000"),
        WorkerSettings(grpc="b:50051"),
        WorkerSettings(http="https://c:8000"),
    ]
    assert [worker.name for worker in workers] == ["a:50051", "b:50051", "c:8000"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a:50051", "HEADRACE_WORKERS: 'a:50051': write grpc://host:port, http://host:port, or both joined by +"),
        (" , ", "HEADRACE_WORKERS: ' , ' names no worker: write grpc://host:port, http://host:port, or both joined by +"),
        ("ftp://a:1", "HEADRACE_WORKERS: 'ftp://a:1': write grpc://host:port, http://host:port, or both joined by +"),
        ("grpc://", "HEADRACE_WORKERS: 'grpc://': write grpc://host:port, http://host:port, or both joined by +"),
        ("grpc://a", "HEADRACE_WORKERS: grpc://a: grpc: 'a' is not host:port"),
        ("grpc://a:1+grpc://b:1", "HEADRACE_WORKERS: 'grpc://a:1+grpc://b:1' names two grpc servers; part workers by a comma"),
        ("http://a:1+https://b:1", "HEADRACE_WORKERS: 'http://a:1+https://b:1' names two http servers; part workers by a comma"),
    ],
)
def test_an_error_in_the_quick_form_says_what_to_write(text, expected):
    with pytest.raises(SettingsError) as raised:
        parse_workers(text)
    assert str(raised.value) == expected


@pytest.mark.parametrize("id_", ["a/b", "a?", "a#b", "a%2Fb", "a b", "a\n", "\x7f", "ä", ".", ".."])
def test_an_id_that_can_not_stand_in_a_path_is_refused(id_):
    with pytest.raises(ValueError, match=f"^id: {re.escape(repr(id_))} can't stand in a path; write printable ASCII without"):
        WorkerSettings(grpc="a:1", id=id_)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"grpc": "[::1]:50051"}, "[::1]:50051"),
        ({"grpc": "10.0.0.1:50051"}, "10.0.0.1:50051"),
        ({"http": "http://[::1]:8000/"}, "[::1]:8000"),
        ({"http": "http://10.0.0.5:8000/engines/a/"}, "10.0.0.5:8000-engines-a"),
        ({"http": "https://my-host.example:8000"}, "my-host.example:8000"),
        ({"grpc": "a:1", "id": "rack-1.node_2@east,x=y"}, "rack-1.node_2@east,x=y"),
    ],
)
def test_ids_that_are_made_from_addresses_can_stand_in_a_path(settings, name):
    assert WorkerSettings(**settings).name == name


def test_the_environment_names_the_file_and_replaces_its_workers(tmp_path, monkeypatch):
    file = tmp_path / "my.toml"
    file.write_text("[[workers]]\ngrpc = 'a:1'\n[server]\nport = 9")
    monkeypatch.setenv("HEADRACE_CONFIG", str(file))
    monkeypatch.delenv("HEADRACE_WORKERS", raising=False)
    assert [worker.name for worker in load_settings().workers] == ["a:1"]
    monkeypatch.setenv("HEADRACE_WORKERS", "grpc://b:1")
    settings = load_settings()
    assert [worker.name for worker in settings.workers] == ["b:1"]
    assert settings.server.port == 9


def test_the_file_in_the_current_folder_is_read_when_there_is_one(tmp_path, monkeypatch):
    monkeypatch.delenv("HEADRACE_CONFIG", raising=False)
    monkeypatch.delenv("HEADRACE_WORKERS", raising=False)
    monkeypatch.chdir(tmp_path)
    assert load_settings().server.port == 8000
    (tmp_path / "headrace.toml").write_text("[server]\nport = 9")
    assert load_settings().server.port == 9


@pytest.mark.parametrize("content", [None, b"\xff"])
def test_a_file_that_cannot_be_read_is_named(tmp_path, content):
    file = tmp_path / "x.toml"
    if content:
        file.write_bytes(content)
    with pytest.raises(SettingsError, match=str(file)):
        load_settings(str(file))


def test_two_workers_of_one_name_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADRACE_WORKERS", "grpc://a:1,grpc://a:1+http://a:2")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError, match=r"workers: 'a:1' is there twice; give each its own id"):
        load_settings()


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("grpc = 'h:1'", "grpc = 'h:1'", "'a' and 'b' have one grpc server, h:1; a"),
        (
            "grpc = 'h:1'\nhttp = 'http://h:2/'",
            "http = 'http://h:2'",
            "'a' and 'b' have one http server, http://h:2; a",
        ),
    ],
)
def test_two_workers_of_one_server_are_refused(tmp_path, monkeypatch, first, second, message):
    monkeypatch.delenv("HEADRACE_WORKERS", raising=False)
    file = tmp_path / "x.toml"
    file.write_text(f"[[workers]]\nid = 'a'\n{first}\n[[workers]]\nid = 'b'\n{second}\n")
    with pytest.raises(SettingsError, match=message):
        load_settings(str(file))


def test_an_api_key_that_is_not_in_the_environment_is_named(tmp_path, monkeypatch):
    monkeypatch.delenv("HEADRACE_WORKERS", raising=False)
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    file = tmp_path / "x.toml"
    file.write_text("[[workers]]\nhttp = 'http://a:1'\napi_key_env = 'NO_SUCH_KEY'")
    with pytest.raises(SettingsError, match=r"workers: 'a:1': api_key_env names NO_SUCH_KEY, which is not set"):
        load_settings(str(file))
    monkeypatch.setenv("NO_SUCH_KEY", "k")
    assert load_settings(str(file)).workers[0].api_key_env == "NO_SUCH_KEY"


@pytest.mark.parametrize("server", ["grpc = 'a:1'", "http = 'https://a:1'"])
@pytest.mark.parametrize(
    ("tls", "message"),
    [
        ("ca = '/nowhere/ca.pem'", "workers: 'w': tls.ca: there is no file '/nowhere/ca.pem'"),
        ("key = '/nowhere/key.pem'", "workers: 'w': tls.key is set but tls.cert is not; mutual TLS needs both"),
        ("cert = 'JUNK'", "workers: 'w': tls.cert, tls.key: 'JUNK' can't be used "),
    ],
)
def test_files_of_tls_that_cannot_be_used_are_named_with_worker_and_key(tmp_path, monkeypatch, server, tls, message):
    monkeypatch.delenv("HEADRACE_WORKERS", raising=False)
    junk = tmp_path / "junk.pem"
    junk.write_text("junk")
    file = tmp_path / "x.toml"
    file.write_text(f"[[workers]]\nid = 'w'\n{server}\ntls = {{ {tls.replace('JUNK', str(junk))} }}\n")
    with pytest.raises(SettingsError) as raised:
        load_settings(str(file))
    assert str(raised.value).startswith(message.replace("JUNK", str(junk)))
    assert "\n" not in str(raised.value)


class Tenant(PluginSettings, frozen=True):
    weight: int = 1


class Tenants(PluginSettings, frozen=True):
    tenants: dict[str, Tenant] = field(default_factory=dict[str, Tenant])
    default: Tenant | None = None
    limit: dict[str, int] | int = 0


def convert(table):
    return convert_settings(table, Tenants, source="settings", path="plugins.tenants")


def test_the_settings_of_a_plugin_may_hold_tables_by_name():
    settings = convert({"tenants": {"a": {"weight": 2}, "weight": {}}, "default": {"weight": 3}, "limit": {"x": 1}})
    assert settings.tenants == {"a": Tenant(2), "weight": Tenant()}
    assert settings.default == Tenant(3)


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({"tenant": {}}, "settings: unknown key plugins.tenants.tenant: did you mean 'tenants'?"),
        ({"tenants": {"a": {"wieght": 2}}}, "settings: unknown key plugins.tenants.tenants.a.wieght: did you mean 'weight'?"),
        ({"default": {"wieght": 2}}, "settings: unknown key plugins.tenants.default.wieght: did you mean 'weight'?"),
    ],
)
def test_an_unknown_key_of_a_plugin_is_named_with_its_place(table, expected):
    with pytest.raises(SettingsError) as raised:
        convert(table)
    assert str(raised.value) == expected
