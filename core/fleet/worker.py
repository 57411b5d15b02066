"""One vLLM server that headrace can reach, as everybody else sees it."""

import time
from collections.abc import Awaitable, Callable, Generator, Mapping, Set
from contextlib import contextmanager
from typing import Any, Literal

import httpx
import msgspec
import trio
from msgspec import Struct

from core.errors import WorkerLost
from core.fleet.managed import Process
from core.settings import WorkerSettings
from core.wire.generated.vllm import ControlStub
from core.wire.lane import Lane

#: `starting` was never ready · `ready` takes calls · `paused` its engine is · `updating` its weights are being replaced ·
#: `quarantined` it failed an update · `draining` finishes what it has · `gone` can't be reached, or is not healthy.
State = Literal["starting", "ready", "paused", "updating", "quarantined", "draining", "gone"]

#: States in which headrace itself holds a worker, whatever probes find.
HeldState = Literal["paused", "updating", "quarantined", "draining"]


class Observed(Struct, frozen=True):
    """How a worker is, as far as its probes tell: `starting`, `ready`, `paused` or `gone`."""

    state: State
    reason: str


class Hold(Struct, frozen=True):
    """A state in which headrace holds a worker, and why. It is hidden, and stays, while the worker can't be reached."""

    state: HeldState
    reason: str
    #: It has other weights than the fleet should have, so that its version says nothing about the others'.
    late: bool = False


class WorkerInfo(Struct, frozen=True, kw_only=True):
    """What a worker says of itself once; lengths and sizes are in tokens unless they say otherwise."""

    #: The names under which it serves its model; the first is the main one.
    models: tuple[str, ...]
    #: Path or hub name of the model.
    model_id: str
    max_model_len: int
    engine_version: str = ""
    instance_id: str = ""
    #: Ranks of one replica: tensor × pipeline parallel.
    world_size: int = 1
    #: The data-parallel ranks that it hosts.
    ranks: tuple[int, ...] = (0,)
    data_parallel_size: int = 1
    kv_block_size: int = 0
    #: In blocks, over all ranks.
    total_kv_blocks: int = 0
    max_running_requests: int = 0
    supports_lora: bool = False
    supports_multimodal: bool = False
    supports_sleep: bool = False
    supports_draft_updates: bool = False
    weight_transfer_backend: str = ""

    @property
    def kv_blocks_per_rank(self) -> int:
        """What one of its data-parallel ranks holds; 0 when it doesn't tell."""
        return max(self.total_kv_blocks // len(self.ranks), 1) if self.total_kv_blocks else 0


class Worker:
    """A worker and its state.

    Only the fleet changes `state`, `hold`, `info`, `lanes` and `policy_version`; plugins read them.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings
        self.id = settings.name
        self.role = settings.role
        self.state: State = "starting"
        #: Why it is in that state; empty when it is ready.
        self.reason = "not probed yet"
        self.observed = Observed(self.state, self.reason)
        self.hold: Hold | None = None
        #: Counts what was done to the engine; an answer to a probe that was sent before is out of date.
        self.changes = 0
        self.info: WorkerInfo | None = None
        self._policy_version: str | None = None
        #: How often that has changed, and how often a probe was the first to find it changed: then nobody knows since when.
        self.version_changes = 0
        self.version_finds = 0
        #: When it was last labelled through headrace, on the monotonic clock; 0 for never.
        self.labelled_at = 0.0
        #: Told of each change of its version.
        self.relabelled: Callable[[], None] = _nothing
        #: In order of preference.
        self.lanes: tuple[Lane, ...] = ()
        #: Why no call goes over the HTTP server that the settings name; empty when calls do, or there is none.
        self.http_closed = ""
        #: The worker's `vllm.Control` service and its HTTP server, for administration; `None` where it has none.
        self.control: ControlStub | None = None
        self.http: httpx.AsyncClient | None = None
        #: Waits until the worker has read the cancellations that were sent to it; has a deadline of its own.
        self.settle: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint
        #: Unix time, in seconds, at which it was last introduced.
        self.introduced_at = 0.0
        #: Its process, when headrace runs it.
        self.process: Process | None = None
        #: Operations of administration that it has not answered yet. Its engine may be too busy with one to answer a probe.
        self.administrations = 0
        self._calls: set[trio.CancelScope] = set()
        self._suspected = trio.Event()

    def __repr__(self) -> str:
        return f"<Worker {self.id} {self.state}>"

    @property
    def policy_version(self) -> str | None:
        """The version of its weights as the worker labels them; `None` when it doesn't tell."""
        return self._policy_version

    @policy_version.setter
    def policy_version(self, version: str | None) -> None:
        self.labelled_at = time.monotonic()
        self._change_version(version)

    def find_version(self, version: str | None) -> None:
        """A probe has found it labelled so."""
        self.version_finds += version != self._policy_version
        self._change_version(version)

    def _change_version(self, version: str | None) -> None:
        if version != self._policy_version:
            self._policy_version = version
            self.version_changes += 1
            self.relabelled()

    @property
    def models(self) -> tuple[str, ...]:
        """The names under which it serves its model; empty while it was never reached."""
        return self.info.models if self.info else ()

    @property
    def is_there(self) -> bool:
        """Whether it was introduced and can be reached, whatever its state."""
        return self.info is not None and self.state not in ("starting", "gone")

    @property
    def world_size(self) -> int:
        """How many ranks take part in a weight update: those of one replica, times the replicas that it hosts."""
        return self.info.world_size * len(self.info.ranks) if self.info else 0

    def lane_for(self, needs: Set[str]) -> Lane | None:
        """The first lane that serves all the needs."""
        return next((lane for lane in self.lanes if needs <= lane.can), None)

    @property
    def in_flight(self) -> int:
        """Calls that are on this worker now."""
        return len(self._calls)

    @contextmanager
    def serving(self) -> Generator[None, None, None]:
        """The scope of a call on this worker.

        Raises: `WorkerLost` when the worker was lost under it (`lose_calls`).
        """
        scope = trio.CancelScope()
        self._calls.add(scope)
        try:
            with scope:
                yield
        finally:
            self._calls.discard(scope)
        if scope.cancelled_caught:
            raise WorkerLost(f"the worker was lost: {self.reason}")

    def lose_calls(self) -> None:
        """The worker is dead though its connections stand (vLLM 0.33: streams of an engine that was killed hang for ever; those of a
        process that was stopped last until the connection is given up).
        """
        for scope in self._calls:
            scope.cancel()

    @contextmanager
    def administered(self) -> Generator[None, None, None]:
        """The scope of an operation on this worker."""
        self.administrations += 1
        try:
            yield
        finally:
            self.administrations -= 1

    def suspect(self) -> None:
        """A call found the worker unreachable: probe it now."""
        self._suspected.set()

    async def suspected(self) -> None:
        """Wait until somebody suspects the worker. Cancellation: safe."""
        await self._suspected.wait()
        self._suspected = trio.Event()

    def describe(self) -> dict[str, Any]:
        """The worker's entry in `GET /fleet`."""
        info = self.info
        return {
            "id": self.id,
            "state": self.state,
            "reason": self.reason,
            "model": info.models[0] if info else None,
            "policy_version": self.policy_version,
            "role": self.role,
            "world_size": self.world_size,
            "ranks": list(info.ranks) if info else [],
            "data_parallel_size": info.data_parallel_size if info else None,
            "capabilities": _capabilities(info, {lane.wire: sorted(lane.can) for lane in self.lanes}, self.http_closed),
            "in_flight": self.in_flight,
            "grpc": self.settings.grpc,
            "http": self.settings.http,
            "engine_version": info.engine_version if info else None,
            "max_model_len": info.max_model_len if info else None,
            "kv_block_size": info.kv_block_size if info else None,
            "total_kv_blocks": info.total_kv_blocks if info else None,
            "kv_blocks_per_rank": info.kv_blocks_per_rank if info else None,
            **({"process": msgspec.to_builtins(self.process)} if self.process else {}),
        }


def _nothing() -> None:
    """Nobody wants to know."""


def _capabilities(info: WorkerInfo | None, wires: Mapping[str, list[str]], http_closed: str) -> dict[str, Any]:
    return {
        #: wire → the needs that it serves beyond the plain fields
        "wires": wires,
        #: wire → why no call goes over it, although the settings name it
        "closed": {"http": http_closed} if http_closed else {},
        "lora": bool(info and info.supports_lora),
        "multimodal": bool(info and info.supports_multimodal),
        "sleep": bool(info and info.supports_sleep),
        "draft_updates": bool(info and info.supports_draft_updates),
        "weight_transfer": (info and info.weight_transfer_backend) or None,
    }
