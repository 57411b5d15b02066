"""All workers: joining when they are ready, leaving when they are not."""

import time
from collections.abc import Iterable

import structlog
import trio

from core.errors import PluginFault
from core.fleet.connection import Connection, connect
from core.fleet.gate import Gate
from core.fleet.probe import ProbeFailed
from core.fleet.worker import State, Worker
from core.registry import Registry
from core.settings import GateSettings, ProbeSettings, WorkerSettings

log = structlog.stdlib.get_logger()

#: States of a worker that isn't there, for any purpose.
_ABSENT = frozenset({"starting", "gone"})


class Fleet:
    """The workers by id. Plugins are told of each that comes and goes: `prepare_worker`, `worker_joined`, `worker_left`, in turn."""

    def __init__(self, probe: ProbeSettings, gate: GateSettings, registry: Registry) -> None:
        self._probe = probe
        self._registry = registry
        self.workers: dict[str, Worker] = {}
        #: The workers that take calls, in the order in which they were added.
        self.ready: tuple[Worker, ...] = ()
        self.gate = Gate(gate)

    async def run(self, workers: Iterable[WorkerSettings]) -> None:
        """Serve these workers until cancelled."""
        async with trio.open_nursery() as nursery:
            for settings in workers:
                nursery.start_soon(self.serve, settings)

    async def serve(self, settings: WorkerSettings) -> None:
        """Keep one worker in the fleet for as long as this runs: connect, probe, let it join and leave.

        Cancellation is how it ends: the worker leaves the fleet and its connections are closed.
        Raises: `ValueError` when a worker of that id is there already.
        """
        worker = Worker(settings)
        if worker.id in self.workers:
            raise ValueError(f"worker {worker.id!r} is in the fleet already")
        self.workers[worker.id] = worker
        try:
            async with connect(settings) as connection:
                worker.control, worker.http = connection.control, connection.http
                await self._watch(worker, connection)
        finally:
            self._set(worker, "gone", "taken out of the fleet")
            del self.workers[worker.id]

    def paused(self, worker: Worker) -> None:
        """Somebody has paused the worker's engine: no calls until a probe finds it running."""
        if worker.state == "ready":
            self._set(worker, "paused", "its engine refused a call, because it is paused")

    async def _watch(self, worker: Worker, connection: Connection) -> None:
        failures = certain = 0
        while True:
            failure = await self._look(worker, connection)
            if failure and not failure.certain and worker.administrations and worker.state not in _ABSENT:
                failure = None  # vLLM 0.33: an engine answers nobody while it joins a trainer's group, or receives weights
            failures = failures + 1 if failure else 0
            certain = certain + 1 if failure and failure.certain else 0
            if failure and (failure.certain or failures >= self._probe.failures or worker.state in _ABSENT):
                self._set(worker, "starting" if worker.state == "starting" else "gone", str(failure))
            if certain > 1:  # once may be a hiccup, and calls are dear
                worker.lose_calls()
            with trio.move_on_after(self._probe.interval):
                await worker.suspected()

    async def _look(self, worker: Worker, connection: Connection) -> ProbeFailed | None:
        """Probe once, and let the worker join, pause or go on accordingly."""
        try:
            with trio.fail_after(self._probe.timeout):
                if worker.state in _ABSENT:
                    await self._introduce(worker, connection)
                report = await connection.probe.check()
            worker.policy_version = report.policy_version
            if worker.state in _ABSENT:
                await self._registry.prepare(worker)
        except ProbeFailed as failure:
            return failure
        except trio.TooSlowError:
            return ProbeFailed(f"no answer to a probe within {self._probe.timeout:g} s", certain=False)
        except PluginFault as fault:
            return ProbeFailed(f"{fault.message}: {fault.__cause__}", certain=True)
        if report.paused:
            self._set(worker, "paused", "its engine is paused")
        else:
            self._set(worker, "ready", "")
        return None

    async def _introduce(self, worker: Worker, connection: Connection) -> None:
        """Learn who listens there now: it may be another process than before."""
        worker.info = await connection.probe.introduce()
        worker.introduced_at = time.time()
        worker.lanes = await connection.lanes(worker.info.max_model_len)

    def _set(self, worker: Worker, state: State, reason: str) -> None:
        before, known = worker.state, worker.reason
        worker.state, worker.reason = state, reason
        if (state, reason) != (before, known):
            log.info("worker.state", worker=worker.id, state=state, before=before, reason=reason)
        if before == state:
            return
        if before in _ABSENT and state not in _ABSENT:
            self._registry.tell("worker_joined", worker=worker)
        self.ready = tuple(w for w in self.workers.values() if w.state == "ready")
        if state in _ABSENT and before not in _ABSENT:
            self._registry.tell("worker_left", worker=worker)
        self.gate.notify()
