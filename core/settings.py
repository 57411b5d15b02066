"""`headrace.toml`: typed settings whose errors name the key, and the nearest known one."""

import os
import re
import tomllib
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Final, Literal, TypeVar, Union, cast, get_args, get_origin
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, Struct, field

from core.tls import TLSFiles
from core.wording import in_words, nearest

Role = Literal["aggregated", "prefill", "decode", "encode"]
Seconds = Annotated[float, Meta(gt=0)]
Count = Annotated[int, Meta(ge=1)]
T = TypeVar("T", bound=Struct)
#: A worker's id. `.` and `..` in a path mean another one.
_ID: Final = re.compile(r'(?!\.{1,2}\Z)[!"$&-.0->@-~]+')


class SettingsError(Exception):
    """The settings can't be used; the text names the key, what was wrong and what is allowed."""


class WorkerSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """One vLLM server. At least one of `grpc` and `http` is there."""

    #: `host:port` of the native gRPC server (`--grpc-port`).
    grpc: str | None = None
    #: `http://host:port` of the HTTP server; it serves what gRPC can't carry.
    http: str | None = None
    #: Shown everywhere, and a part of paths (`/workers/<id>/pause`): printable ASCII without spaces, `/`, `?`, `#` and `%`. The address
    #: when it is not given, with a `-` for each `/` of an URL's path.
    id: str = ""
    role: Role = "aggregated"
    #: For the gRPC server, and for an HTTP server with `https`.
    tls: TLSFiles | None = None
    #: The environment variable that holds the worker's API key (`--api-key`), for its HTTP server.
    api_key_env: str | None = None
    #: Tells two data-parallel groups of one model apart, when their replicas are spread over several workers each.
    group: str = ""
    #: The command that serves it, when headrace is to run it: started, started again when it ends, and stopped with headrace.
    command: list[str] = field(default_factory=list[str])
    #: Added to headrace's own environment for the command.
    environment: dict[str, str] = field(default_factory=dict[str, str])
    #: The file that what it prints is added to; default: the worker's id with `.log` behind it, in the current folder.
    output: str = ""
    #: Between SIGTERM and SIGKILL.
    stop_timeout: Seconds = 30.0

    def __post_init__(self) -> None:
        if not self.grpc and not self.http:
            raise ValueError("a worker needs grpc = 'host:port', http = 'http://host:port', or both")
        if self.grpc:
            split_address(self.grpc)
        if self.http and not _is_url(self.http):
            raise ValueError(f"http: {self.http!r} is not a URL; write http://host:port")
        if not _ID.fullmatch(self.name):
            raise ValueError(f"id: {self.name!r} can't stand in a path; write printable ASCII without spaces, /, ?, # and %")
        if self.tls and not self.grpc and not str(self.http).startswith("https:"):
            raise ValueError(f"tls: http is {self.http!r}, without TLS; write https://")
        if (self.environment or self.output) and not self.command:
            raise ValueError("environment and output are those of a command, and there is none")

    @property
    def name(self) -> str:
        """`id`, or else the first address."""
        return self.id or self.grpc or str(self.http).partition("://")[2].rstrip("/").replace("/", "-")


class ServerSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """How headrace itself listens; `headrace serve` only, except for the limits of a request."""

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, lt=65536)] = 8000
    #: How long calls in flight may go on after the first SIGTERM or SIGINT. A second signal ends them at once.
    shutdown_timeout: Seconds = 30.0
    #: Largest request body, in MiB.
    max_body_mib: Count = 64
    #: A request of whose body nothing more comes for so long is refused (408).
    body_timeout: Seconds = 60.0
    #: A client that reads nothing for so long loses its call: the worker is released.
    stall_timeout: Seconds = 60.0
    #: An idle stream gets a `: keep-alive` comment this often; 0 turns them off.
    keep_alive_interval: Annotated[float, Meta(ge=0)] = 15.0


class ProbeSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """When a worker counts as ready, and when as gone."""

    #: Between two probes of a worker.
    interval: Seconds = 2.0
    #: For one probe. Long, because a busy worker is not a dead one.
    timeout: Seconds = 10.0
    #: So many failed probes in a row make a ready worker `gone`.
    failures: Count = 3


class GateSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """Calls that arrive while every worker for them is paused wait at the gate."""

    #: So many calls may wait; one more gets a 503.
    max_waiting: Count = 65536
    #: A call that has waited so long gets a 503.
    timeout: Seconds = 1800.0


class AdministrationSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """Pausing, sleeping and updating the fleet."""

    #: For each worker's answer to what needs nobody but it: pausing (but for mode=wait), resuming, labels.
    deadline: Seconds = 60.0
    #: An operation that lasts longer is reported in the log, again and again, with the workers that it waits for.
    stuck_after: Seconds = 60.0
    #: A step of an update for which a worker has taken so long has failed there: whoever it waits for won't come.
    update_timeout: Seconds = 3600.0
    #: A pause ends when its trainer has been silent for so long. As long as calls wait at the gate.
    lease: Seconds = 1800.0
    #: SQLite file of the journal, which then survives a restart. Empty: in memory only, so that a headrace that is started again resumes no
    #: worker that it finds paused: it can't know whether an update was open there. A file that can't be used is an error at the start.
    journal: str = ""


Policies = Annotated[list[str], Meta(min_length=1)]
Lag = Annotated[int, Meta(ge=0)] | None


class RoutingRule(Struct, frozen=True, forbid_unknown_fields=True):
    """`[[routing.rules]]`: who places certain calls. The first rule that fits a call counts."""

    #: Plugins that choose a worker, asked in this order.
    policies: Policies
    #: A name under which workers serve it; empty for every model.
    model: str = ""
    #: Of the workers that the call may go to; where these are aggregated and decode workers, `aggregated`. `None` for every role.
    role: Role | None = None


class RoutingSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """Who places calls."""

    #: Plugins that choose a worker, asked in this order, for calls that no rule fits.
    policies: Policies = field(default_factory=lambda: ["round-robin"])
    rules: list[RoutingRule] = field(default_factory=list[RoutingRule])
    #: How many further workers are tried when one is lost before its first token.
    retries: Annotated[int, Meta(ge=0)] = 2
    #: By how many policy versions a worker may be behind the newest one of its model and still get calls. `None`: by any number.
    max_version_lag: Lag = None

    @property
    def named(self) -> frozenset[str]:
        """Every policy that is named, by whichever rule."""
        return frozenset(self.policies).union(*(rule.policies for rule in self.rules))


class LogSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """One event per line, on stderr."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    #: `console` for people, `json` and `logfmt` for machines.
    format: Literal["console", "json", "logfmt"] = "logfmt"


class PluginsSettings(Struct, frozen=True):
    """`[plugins]`. Each plugin's own section, `[plugins.NAME]`, is checked by its settings type."""

    enable: list[str] = field(default_factory=list[str])
    disable: list[str] = field(default_factory=list[str])
    sections: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])


class Settings(Struct, frozen=True, forbid_unknown_fields=True):
    """The whole of `headrace.toml`."""

    workers: list[WorkerSettings] = field(default_factory=list[WorkerSettings])
    server: ServerSettings = ServerSettings()
    probe: ProbeSettings = ProbeSettings()
    gate: GateSettings = GateSettings()
    administration: AdministrationSettings = AdministrationSettings()
    routing: RoutingSettings = field(default_factory=RoutingSettings)
    log: LogSettings = LogSettings()
    plugins: PluginsSettings = field(default_factory=PluginsSettings)


class PluginSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """Base of a plugin's settings: a frozen Struct whose unknown keys are errors."""


def load_settings(path: str | None = None) -> Settings:
    """Settings from the file at `path`, else `$HEADRACE_CONFIG`, else `headrace.toml` here if there is one, else the defaults.

    `$HEADRACE_WORKERS` (`grpc://host:50051+http://host:8000,…`: `+` joins the two servers of one worker, `,` parts workers) replaces
    the file's workers.

    Raises: `SettingsError`.
    """
    chosen = path or os.environ.get("HEADRACE_CONFIG")
    file = Path(chosen or "headrace.toml")
    text = ""
    if chosen or file.exists():
        try:
            text = file.read_text(encoding="utf-8")
        except OSError as error:
            raise SettingsError(f"{file}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise SettingsError(f"{file}: it is not UTF-8: {error.reason} at byte {error.start}") from error
    settings = parse_settings(text, source=str(file))
    if workers := os.environ.get("HEADRACE_WORKERS"):
        settings = msgspec.structs.replace(settings, workers=parse_workers(workers))
    _check_workers(settings.workers)
    return settings


def parse_settings(text: str, *, source: str = "headrace.toml") -> Settings:
    """Settings from TOML text. Raises: `SettingsError`."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{source}: {error}") from error
    if isinstance(table.get("plugins"), dict):
        plugins: dict[str, Any] = table["plugins"]
        names = {key: value for key, value in plugins.items() if key in {"enable", "disable"}}
        sections = {key: value for key, value in plugins.items() if key not in names}
        for key, section in sections.items():
            if not isinstance(section, dict):
                raise SettingsError(f"{source}: plugins.{key}: this is a plugin's section, so write [plugins.{key}]")
        table["plugins"] = {**names, "sections": sections}
    return convert_settings(table, Settings, source=source)


def convert_settings(table: Any, type_: type[T], *, source: str, path: str = "") -> T:
    """`table` as a settings type; `source` and `path` say in errors where it stands. Raises: `SettingsError`."""
    _check_keys(table, type_, source, path)
    try:
        return msgspec.convert(table, type_)
    except msgspec.ValidationError as error:
        key, message = in_words(error, path, type_)
        raise SettingsError(f"{source}: {key}: {message}" if key else f"{source}: {message}") from error


def parse_workers(text: str) -> list[WorkerSettings]:
    """Workers from the quick form of `$HEADRACE_WORKERS`. Raises: `SettingsError`."""
    workers: list[WorkerSettings] = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        addresses: dict[str, str] = {}
        for url in item.split("+"):
            scheme, separator, address = url.partition("://")
            if not separator or not address or scheme not in {"grpc", "http", "https"}:
                raise SettingsError(f"HEADRACE_WORKERS: {url!r}: write grpc://host:port, http://host:port, or both joined by +")
            wire = "grpc" if scheme == "grpc" else "http"
            if wire in addresses:
                raise SettingsError(f"HEADRACE_WORKERS: {item!r} names two {wire} servers; part workers by a comma")
            addresses[wire] = address if scheme == "grpc" else url
        workers.append(convert_settings(addresses, WorkerSettings, source="HEADRACE_WORKERS", path=item))
    if not workers:
        raise SettingsError(f"HEADRACE_WORKERS: {text!r} names no worker: write grpc://host:port, http://host:port, or both joined by +")
    return workers


def split_address(address: str) -> tuple[str, int]:
    """`host:port` (`[::1]:port` for IPv6) as host and port. Raises: `ValueError`."""
    host, separator, port = address.rpartition(":")
    if not separator or not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise ValueError(f"grpc: {address!r} is not host:port")
    return host.strip("[]"), int(port)


def _is_url(text: str) -> bool:
    try:
        url = urlsplit(text)
        return url.scheme in ("http", "https") and bool(url.hostname) and (url.port or 80) > 0
    except ValueError:  # the port is none
        return False


def _check_workers(workers: list[WorkerSettings]) -> None:
    seen: set[str] = set()
    servers: dict[tuple[str, str], str] = {}
    for worker in workers:
        if worker.name in seen:
            raise SettingsError(f"workers: {worker.name!r} is there twice; give each its own id")
        seen.add(worker.name)
        for wire, address in (("grpc", worker.grpc), ("http", worker.http and worker.http.rstrip("/"))):
            if address and (other := servers.setdefault((wire, address), worker.name)) != worker.name:
                raise SettingsError(f"workers: {other!r} and {worker.name!r} have one {wire} server, {address}; a server is one worker")
        if worker.api_key_env and not os.environ.get(worker.api_key_env):
            raise SettingsError(f"workers: {worker.name!r}: api_key_env names {worker.api_key_env}, which is not set")
        if worker.tls:
            try:
                worker.tls.context(())
            except ValueError as error:
                raise SettingsError(f"workers: {worker.name!r}: {error}") from error


def _check_keys(table: Any, type_: Any, source: str, path: str) -> None:
    """Walk the table beside the type, so that an unknown key is reported with its neighbours' names."""
    if isinstance(type_, type) and issubclass(type_, Struct):
        _check_struct(table, type_, source, path)
        return
    inner = get_args(type_)
    match table, get_origin(type_):
        case list(), origin if origin is list:
            for i, item in enumerate(cast("list[Any]", table)):
                _check_keys(item, inner[0], source, f"{path}[{i}]")
        case dict(), origin if origin is dict:
            for key, value in cast("dict[str, Any]", table).items():
                _check_keys(value, inner[1], source, f"{path}.{key}")
        case dict() | list(), origin if origin in (Union, UnionType):
            # Of two alternatives of a kind, msgspec alone knows which is meant.
            fitting = [each for each in inner if _fits(table, each)]
            if len(fitting) == 1:
                _check_keys(table, fitting[0], source, path)
        case _:
            pass


def _check_struct(table: Any, struct: type[Struct], source: str, path: str) -> None:
    if not isinstance(table, dict):
        return
    fields = {f.encode_name: f.type for f in msgspec.structs.fields(struct)}
    for key, value in cast("dict[str, Any]", table).items():
        where = f"{path}.{key}" if path else key
        if key not in fields:
            raise SettingsError(f"{source}: unknown key {where}: {nearest(key, list(fields))}")
        _check_keys(value, fields[key], source, where)


def _fits(table: Any, type_: Any) -> bool:
    kind = get_origin(type_) or type_
    if isinstance(kind, type) and issubclass(kind, Struct):
        kind = dict
    return kind is (dict if isinstance(table, dict) else list)
