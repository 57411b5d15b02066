"""Where a worker's engines publish their KV events: as the worker says, or the settings."""

import re
from collections.abc import Iterator, Mapping
from typing import Final
from urllib.parse import urlsplit

import httpx
import msgspec
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from msgspec import Struct

from core import Worker
from core.wire.generated.vllm import GetKvEventSourcesRequest

#: What ZeroMQ reaches on another machine, or on this one.
_ADDRESS: Final = re.compile(r"tcp://[^\s/]+:(?P<port>[0-9]{1,5})|ipc://\S+")


class Source(Struct, frozen=True):
    """One engine's publisher. `binds` says who binds the endpoint: the engine, or (`False`) we; `None`: we if we can."""

    rank: int
    endpoint: str
    topic: str = ""
    replay: str = ""
    binds: bool | None = None


class SourceSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """`[plugins.kv.sources.WORKER]`: for a worker that doesn't tell, or whose address is another one from here."""

    #: As rank 0 has it; rank r has the port + r. `*` is the worker's host.
    endpoint: str
    #: Where lost events can be asked for (`replay_endpoint`); empty: nowhere.
    replay: str = ""
    topic: str = ""
    #: Whether the engine binds the endpoint, as it does when that contains `*` or `::`. If not, headrace does.
    binds: bool = True

    def __post_init__(self) -> None:
        for key, address in (("endpoint", self.endpoint), ("replay", self.replay)):
            found = _ADDRESS.fullmatch(address)
            is_one = found and 0 < int(found["port"] or 1) < 65536
            if not is_one and (address or key == "endpoint"):
                raise ValueError(f"{key}: {address!r}: write tcp://host:port or ipc://path")

    def of(self, worker: Worker) -> list[Source]:
        """The sources of all its ranks."""
        host = _host(worker)
        endpoint = _at(self.endpoint, host) if self.binds else self.endpoint
        return [
            Source(rank, _offset(endpoint, rank), self.topic, _offset(_at(self.replay, host), rank), self.binds)
            for rank in (worker.info.ranks if worker.info else (0,))
        ]


async def discover(worker: Worker) -> list[Source]:
    """Ask the worker; empty when its engines publish nothing that we could read.

    Raises: `GRPCError`, `httpx.HTTPError` when it doesn't answer; `msgspec.MsgspecError` when nobody understands its answer.
    """
    told = await _over_grpc(worker) if worker.control else None
    if told is None:
        told = await _over_http(worker)
    host = _host(worker)
    return [
        Source(rank, _at(one.endpoint, host), one.topic, _at(one.replay_endpoint or "", host), _binds(one.endpoint))
        for rank, one in told
        if one.publisher == "zmq" and one.endpoint
    ]


class _Told(Struct):
    endpoint: str
    topic: str = ""
    replay_endpoint: str | None = None
    publisher: str | None = "zmq"


async def _over_grpc(worker: Worker) -> list[tuple[int, _Told]] | None:
    assert worker.control is not None
    try:
        reply = await worker.control.get_kv_event_sources(GetKvEventSourcesRequest())
    except GRPCError as error:
        if error.status is Status.UNIMPLEMENTED:
            return None
        raise
    return [(one.data_parallel_rank or 0, _Told(one.endpoint, one.topic, one.replay_endpoint, one.transport)) for one in reply.sources]


async def _over_http(worker: Worker) -> list[tuple[int, _Told]]:
    if worker.http is None:
        return []
    response = await worker.http.get("/kv_event_sources")
    if response.status_code == httpx.codes.NOT_FOUND:
        return []
    response.raise_for_status()
    return list(_ranked(msgspec.json.decode(response.content, type=dict[int, _Told | None])))


def _ranked(told: Mapping[int, _Told | None]) -> Iterator[tuple[int, _Told]]:
    for rank, one in sorted(told.items()):
        if one is not None:
            yield rank, one


def _binds(endpoint: str) -> bool | None:
    """vLLM 0.33: an endpoint with `*` or `::` is bound. Any other one is connected to, or was bound where port 0 was asked for."""
    return True if "*" in endpoint or "::" in endpoint or endpoint.startswith("ipc:") else None


def _at(endpoint: str, host: str) -> str:
    """The endpoint as we reach it: a wildcard is the worker's own host."""
    for wildcard in ("tcp://*:", "tcp://0.0.0.0:", "tcp://[::]:", "tcp://:::"):
        if endpoint.startswith(wildcard):
            return f"tcp://{host}:{endpoint.removeprefix(wildcard)}"
    return endpoint


def _offset(endpoint: str, rank: int) -> str:
    address, separator, port = endpoint.rpartition(":")
    return f"{address}:{int(port) + rank}" if rank and separator and port.isdigit() else endpoint


def _host(worker: Worker) -> str:
    """Of the worker's first address, in brackets when it's IPv6."""
    if worker.settings.grpc:
        return worker.settings.grpc.rpartition(":")[0]
    host = urlsplit(worker.settings.http or "").hostname or "localhost"
    return f"[{host}]" if ":" in host else host
