"""Workers in memory whose engines are paused and updated by vLLM's rules, and a fleet of them under administration."""

import json
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import httpx
import msgspec
import trio
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from msgspec.structs import replace

from core.fleet.administration import Administration
from core.fleet.transport import WeightTransport
from core.fleet.worker import Worker
from core.settings import AdministrationSettings
from core.wire.generated import vllm
from tests.unit.core.lanes import ScriptedLane, output
from tests.unit.core.rig import Rig, make_worker

INIT = {"master_address": "h", "master_port": 1, "rank_offset": 1, "world_size": 3}
UPDATE = {"names": ["w"], "dtype_names": ["float32"], "shapes": [[1]]}


def broken(message: str = "worker died") -> GRPCError:
    """What an engine's failure looks like."""
    return GRPCError(Status.INTERNAL, message)


def refused(message: str = "no backend") -> GRPCError:
    """What a request that can't be served looks like."""
    return GRPCError(Status.FAILED_PRECONDITION, message)


def serve_http(worker, answer: Any):
    bodies = []

    def handler(request) -> Any:
        bodies.append(msgspec.json.decode(request.content))
        return answer(len(bodies)) if callable(answer) else httpx.Response(200, json=answer)

    worker.http = httpx.AsyncClient(base_url="http://w", transport=httpx.MockTransport(handler))
    return bodies


def restart(fleet: "AdministeredFleet", worker: Worker) -> None:
    """Another process comes in the worker's place, with the same engine."""
    assert worker.info
    fleet.rig.move(worker, "gone")
    worker.info = replace(worker.info, instance_id="2")
    fleet.rig.move(worker, "ready")


class Engine:
    """`vllm.Control` of one worker. It fails as `fails` says, each entry once, and waits for `stalls` first."""

    def __init__(self) -> None:
        self.paused = self.asleep = self.updating = self.broken = self.dead = False
        self.version = "default"
        self.instance = "1"
        #: Operations as they came, and what came with the last of each.
        self.asked: list[str] = []
        self.sent: dict[str, Any] = {}
        self.fails: defaultdict[str, list[Exception]] = defaultdict(list)
        self.stalls: dict[str, trio.Event] = {}

    async def pause_generation(self, request: vllm.PauseGenerationRequest) -> None:
        await self._obey("pause", (request.mode, request.clear_cache))
        if request.mode != vllm.PauseMode.KEEP:
            self._step()
        self.paused = True

    async def resume_generation(self, _: object) -> None:
        await self._obey("resume")
        self._step()
        self.paused = False

    async def is_paused(self, _: object) -> vllm.IsPausedResponse:
        return vllm.IsPausedResponse(paused=self.paused)

    async def sleep(self, request: vllm.SleepRequest) -> None:
        await self._obey("sleep", request.level)
        if request.mode == vllm.PauseMode.WAIT:
            self._step()
        self.paused = self.asleep = True

    async def wake_up(self, request: vllm.WakeUpRequest) -> None:
        await self._obey("wake_up", request.tags)
        if not request.tags or "kv_cache" in request.tags:
            self._step()
            self.paused = self.asleep = False

    async def is_sleeping(self, _: object) -> vllm.IsSleepingResponse:
        return vllm.IsSleepingResponse(sleeping=self.asleep)

    async def init_weight_transfer_engine(self, request: vllm.InitWeightTransferEngineRequest) -> None:
        await self._obey("init", json.loads(request.init_info_json))

    async def start_weight_update(self, _: object) -> None:
        await self._obey("start")
        if self.updating:
            raise broken("a weight update is already running")
        self.updating = self.broken = True
        if not self.paused:
            self._step()

    async def start_draft_weight_update(self, _: object) -> None:
        await self.start_weight_update(_)

    async def update_weights(self, request: vllm.UpdateWeightsRequest) -> None:
        info = json.loads(request.update_info_json)
        try:
            await self._obey("update", info)
            if not self.updating or "names" not in info:
                raise broken("update without start, or with nothing in it")
        except GRPCError as error:
            self.updating &= error.status is not Status.INTERNAL
            raise

    async def finish_weight_update(self, request: vllm.FinishWeightUpdateRequest) -> None:
        await self._obey("finish", request.weight_version)
        if not self.updating:
            raise broken("finish without start")
        self.updating = self.broken = False
        self.version = request.weight_version or self.version

    async def update_weight_version(self, request: vllm.UpdateWeightVersionRequest) -> None:
        await self._obey("label", request.weight_version)
        self.version = request.weight_version

    async def get_server_info(self, _: object) -> vllm.ServerInfo:
        return vllm.ServerInfo(instance_id=self.instance)

    async def get_weight_version(self, _: object) -> vllm.GetWeightVersionResponse:
        return vllm.GetWeightVersionResponse(weight_version=self.version)

    async def abort(self, request: vllm.AbortRequest) -> None:
        await self._obey("abort", request.request_ids)

    def _step(self) -> None:
        """Calls may go on, and need a forward pass."""
        self.dead |= self.broken
        assert not self.broken, "a forward pass on weights that aren't there: this engine would be dead"

    async def _obey(self, operation: str, sent: Any = None) -> None:
        self.asked.append(operation)
        self.sent[operation] = sent
        await trio.lowlevel.checkpoint()
        if operation in self.stalls:
            await self.stalls[operation].wait()
        if self.fails[operation]:
            raise self.fails[operation].pop(0)


class AdministeredFleet:
    """Workers `w0`, `w1`, …, their engines in the same order, and what is around them."""

    def __init__(
        self, world_sizes: Sequence[int], models: Sequence[str], settings: AdministrationSettings, transports: Mapping[str, WeightTransport]
    ) -> None:
        self.engines = [Engine() for _ in world_sizes]
        self.workers = [self.make(f"w{i}", self.engines[i], ranks, models[i]) for i, ranks in enumerate(world_sizes)]
        self.rig = Rig(*self.workers)
        self.administration = Administration(self.rig.fleet, settings, transports)
        self.pausing, self.updating = self.administration.pausing, self.administration.updating
        self.joining, self.methods = self.administration.joining, self.administration.methods

    @staticmethod
    def make(name: str, engine: Engine, ranks: int = 1, model: str = "tiny", instance: str = "1") -> Worker:
        worker = make_worker(name, ScriptedLane([output(7, finish="stop")]), models=[model])
        assert worker.info
        worker.info = replace(worker.info, world_size=ranks, instance_id=instance)
        worker.control = cast("vllm.ControlStub", engine)
        return worker

    @property
    def states(self) -> list[str]:
        return [worker.state for worker in self.rig.fleet.workers.values()]

    async def pause(self, **changes: Any) -> None:
        await self.pausing.pause(self.administration.workers(), **{"mode": "keep", "clear_cache": False, "by": "me", **changes})

    async def resume(self) -> None:
        await self.pausing.resume(self.administration.workers(), by="me")

    async def start(self) -> None:
        await self.updating.start(self.administration.workers(), by="me")

    async def receive(self, info: Any = UPDATE) -> None:
        await self.updating.receive(self.administration.workers(), info, by="me")

    async def finish(self, version: str | None = "8") -> None:
        await self.updating.finish(self.administration.workers(), version, by="me")

    async def update(self, version: str | None = "8") -> None:
        await self.start()
        await self.receive()
        await self.finish(version)

    @property
    def journal(self) -> list[tuple[str, Any]]:
        """What happened, and the outcome or the state."""
        return [(entry.what, entry.detail.get("outcome", entry.detail.get("state"))) for entry in self.administration.journal.entries]


@asynccontextmanager
async def administered(
    *world_sizes: int, models: Sequence[str] | None = None, transports: Sequence[WeightTransport] = (), **settings: Any
) -> AsyncIterator[AdministeredFleet]:
    """A fleet of workers with so many ranks, two of one by default; `settings` are those of the administration."""
    sizes = world_sizes or (1, 1)
    fleet = AdministeredFleet(
        sizes, models or ["tiny"] * len(sizes), AdministrationSettings(**settings), {one.name: one for one in transports}
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fleet.administration.run)
        yield fleet
        nursery.cancel_scope.cancel()
