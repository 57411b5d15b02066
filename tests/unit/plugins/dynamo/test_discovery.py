"""Discovery: read as strictly as Dynamo and the trainers' versions do."""

from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import trio

from core.errors import PluginFault
from core.loading import load_plugins
from core.proxy import open_proxy
from core.settings import SettingsError, parse_settings
from tests.unit.plugins.dynamo.fleet import dynamo
from tests.workers.processes import free_ports

ALWAYS = {"namespace", "component", "endpoint", "instance_id", "transport", "request_plane_url", "routes"}
OPTIONAL = {"system_url", "system_routes", "admin_base_url", "model", "world_size", "error"}


def parse(rows: list[dict[str, Any]], *, bare: bool) -> list[dict[str, Any]]:
    """The rules that workers must keep; with `bare`, those of trainers that want bare origins."""
    for row in rows:
        assert ALWAYS <= row.keys() <= ALWAYS | OPTIONAL
        assert all(isinstance(row[key], str) and row[key] for key in ALWAYS - {"instance_id", "routes"})
        assert isinstance(row["instance_id"], int)
        assert 0 <= row["instance_id"] < 2**53
        assert row["request_plane_url"] == f"dyn://{row['namespace']}.{row['component']}.{row['endpoint']}"
        assert row["routes"] == sorted(set(row["routes"]))
        assert all(isinstance(route, str) and route for route in row["routes"])
        assert row.get("system_routes", row["routes"]) == row["routes"]
        if row.get("error"):
            assert row["routes"] == []
            assert "admin_base_url" not in row
            continue
        assert row["world_size"] > 0
        for key in ("admin_base_url", "system_url"):
            parts = urlsplit(row[key])
            assert parts.scheme in ("http", "https")
            assert parts.hostname
            assert (parts.username, parts.query, parts.fragment) == (None, "", "")
            assert not bare or parts.path in ("", "/")
    identities = [(row["component"], row["instance_id"]) for row in rows]
    assert len(set(identities)) == len(rows)
    assert identities == sorted(identities), "this order numbers the ranks"
    urls = [row["admin_base_url"] for row in rows if "admin_base_url" in row]
    assert len(set(urls)) == len(urls)
    return rows


async def test_the_fleet_is_one_worker_at_headraces_own_origin():
    async with dynamo(url="http://10.0.0.5:8000/") as fleet:
        [row] = parse(await fleet.discover(), bare=True)
        assert (row["admin_base_url"], row["system_url"], row["world_size"], row["model"]) == (*["http://10.0.0.5:8000"] * 2, 4, "tiny")
        assert (row["component"], row["namespace"]) == ("backend", "headrace")


async def test_each_worker_is_reached_through_headrace_in_the_order_of_the_fleet():
    async with dynamo(discovery="workers", url="http://10.0.0.5:8000") as fleet:
        rows = parse(await fleet.discover(), bare=False)
        assert [(row["admin_base_url"], row["world_size"]) for row in rows] == [
            ("http://10.0.0.5:8000/workers/w0", 1),
            ("http://10.0.0.5:8000/workers/w1", 3),
        ]


@pytest.mark.parametrize("discovery", ["fleet", "workers"])
async def test_another_process_is_another_instance_and_the_same_one_stays(discovery):
    async with dynamo(discovery=discovery) as fleet:
        first = await fleet.discover()
        assert await fleet.discover() == first
        fleet.enable(instance_id="2")
        second = parse(await fleet.discover(), bare=False)
        assert not {row["instance_id"] for row in first} & {row["instance_id"] for row in second}


async def test_a_worker_that_is_not_there_keeps_trainers_waiting():
    async with dynamo(discovery="workers") as fleet:
        fleet.workers[1].state, fleet.workers[1].reason = "gone", "connection refused"
        rows = parse(await fleet.discover(), bare=False)
        assert [row.get("error") for row in rows] == [None, "w1 is gone: connection refused"]
        assert rows[1]["model"] == "tiny"
        fleet.workers[1].info = None
        assert "model" not in (await fleet.discover())[1]


async def test_the_fleet_as_one_worker_counts_who_is_there():
    async with dynamo() as fleet:
        fleet.workers[1].state = "gone"
        assert [row["world_size"] for row in await fleet.discover()] == [1]
        fleet.workers[0].state = "starting"
        assert await fleet.discover() == []


async def test_quarantined_workers_are_there_to_be_updated():
    async with dynamo(discovery="workers") as fleet:
        fleet.administration.quarantine(fleet.workers[1], "in a test", by="me")
        assert [row["world_size"] for row in parse(await fleet.discover(), bare=False)] == [1, 3]


async def test_several_models_are_no_one_worker():
    async with dynamo(models=["a", "b"]) as fleet:
        rows = parse(await fleet.discover(), bare=True)
        assert [row["model"] for row in rows] == ["a", "b"]
        assert {row["error"] for row in rows} == {"the fleet serves a, b: let discovery name each worker"}


async def test_what_workers_do_is_their_component():
    async with dynamo(discovery="workers") as fleet:
        fleet.workers[0].role, fleet.workers[1].role = "prefill", "decode"
        assert [row["component"] for row in parse(await fleet.discover(), bare=False)] == ["backend", "prefill"]


async def test_the_address_is_by_default_the_one_that_was_asked():
    async with dynamo() as fleet:
        [row] = await fleet.discover()
        assert row["admin_base_url"] == "http://headrace:8000"


async def test_without_any_address_discovery_says_what_is_missing():
    async with dynamo() as fleet:
        browser = await fleet.get("/v1/rl/workers", headers={})
        assert (browser.status, "[plugins.dynamo] url is not set" in browser.json["error"]["message"]) == (400, True)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("port = 8001", "port: it needs url"),
        ('url = "10.0.0.5:8000"', "is no address for trainers"),
        ('url = "http://me@10.0.0.5:8000"', "is no address for trainers"),
        ('url = "http://10.0.0.5:8000/?a=b"', "is no address for trainers"),
        ('url = "http://10.0.0.5:8000#a"', "is no address for trainers"),
        ('url = "http://:8000"', "is no address for trainers"),
        ('discovery = "all"', "discovery: 'all' is none; there are "),
        ('namespace = "a.b"', "namespace"),
        ("port = 65536", "port"),
    ],
)
def test_settings_that_no_trainer_could_use_are_refused(section, message):
    with pytest.raises(SettingsError, match=message):
        load_plugins(parse_settings(f"[plugins.dynamo]\n{section}"))


async def test_discovery_has_a_port_of_its_own_and_nothing_else_is_there(monkeypatch):
    monkeypatch.setattr("core.proxy.configure_log", lambda _: None)
    [port] = free_ports(1)
    settings = parse_settings(f"[plugins]\ndisable = ['stand-in']\n[plugins.dynamo]\nport = {port}\nurl = 'http://127.0.0.1:8000'")
    async with open_proxy(settings), httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
        with trio.fail_after(10):
            reply = await client.get("/v1/rl/workers")
            assert reply.json() == {"protocol_version": 1, "namespace": "headrace", "workers": []}
            assert (await client.post("/engine/control/pause_generation")).status_code == 404
    with pytest.raises(httpx.ConnectError):
        await httpx.AsyncClient(trust_env=False).get(f"http://127.0.0.1:{port}/v1/rl/workers")


async def test_a_port_that_is_taken_ends_the_start(monkeypatch):
    monkeypatch.setattr("core.proxy.configure_log", lambda _: None)
    [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener:
        port = listener.socket.getsockname()[1]
        settings = parse_settings(f"[plugins]\ndisable = ['stand-in']\n[plugins.dynamo]\nport = {port}\nurl = 'http://127.0.0.1:8000'")
        with pytest.raises(PluginFault) as raised:
            async with open_proxy(settings):
                pass
    assert "Address already in use" in str(raised.value.__cause__)
