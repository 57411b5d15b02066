"""All workers: joining when they are ready, leaving when they are not."""

import time
from collections.abc import Callable, Iterable

import structlog
import trio

from core.aborts import Aborts
from core.beside import beside
from core.errors import PluginFault
from core.fleet.connection import Connection, connect
from core.fleet.gate import Gate
from core.fleet.groups import overlap
from core.fleet.managed import Managed
from core.fleet.probe import ProbeFailed
from core.fleet.worker import HeldState, Hold, Observed, State, Worker
from core.registry import Registry
from core.settings import GateSettings, ProbeSettings, WorkerSettings

log = structlog.stdlib.get_logger()

#: States of a worker that isn't there, for any purpose.
_ABSENT = frozenset({"starting", "gone"})
_STILL = frozenset({"paused", "updating"})


class Fleet:
    """The workers by id. Plugins are told of each that comes and goes: `prepare_worker`, `worker_joined`, `worker_left`, in turn."""

    def __init__(self, probe: ProbeSettings, gate: GateSettings, registry: Registry) -> None:
        self._probe = probe
        self._registry = registry
        #: In the order of the settings, then of their coming: cohorts have it, too.
        self.workers: dict[str, Worker] = {}
        #: Names of workers that somebody is starting, and that have no address yet: calls are told of them while there are no others.
        self.coming: set[str] = set()
        #: Told of each worker that comes, before the plugins are, and before it can get a call: it may hold it.
        self.greet: Callable[[Worker], None] = lambda _: None
        #: Told of each worker whose engine its probes have found paused, or running, and before not so.
        self.found: Callable[[Worker], None] = lambda _: None
        #: Told of each worker that takes calls again, or is lost, after it was paused or updated, and how long that took, in seconds.
        self.stood_still: Callable[[float], object] = lambda _: None
        self._still_since: dict[str, float] = {}
        #: The workers that take calls, in the order in which they were added.
        self.ready: tuple[Worker, ...] = ()
        self.gate = Gate(gate)
        #: Of calls by their id, as far as that is nothing for a worker.
        self.aborts = Aborts()

    async def run(self, workers: Iterable[WorkerSettings]) -> None:
        """Serve these workers until cancelled."""
        entered = [self._enter(settings) for settings in workers]
        async with trio.open_nursery() as nursery:
            for worker in entered:
                nursery.start_soon(self._serve, worker)

    async def serve(self, settings: WorkerSettings) -> None:
        """Keep one worker in the fleet for as long as this runs: connect, probe, let it join and leave.

        Cancellation is how it ends: the worker leaves the fleet and its connections are closed.
        Raises: `ValueError` when a worker of that id is there already.
        """
        await self._serve(self._enter(settings))

    def admit(self, worker: Worker) -> None:
        """Let a worker join that was introduced elsewhere and that nobody probes: a simulated one.

        Raises: `ValueError` when a worker of that id is there already.
        """
        self._add(worker)
        self._set(worker, "ready", "")

    def paused(self, worker: Worker) -> None:
        """Somebody has paused the worker's engine: no calls until a probe finds it running."""
        if worker.state == "ready":
            self._set(worker, "paused", "its engine refused a call, because it is paused")

    def hold(self, worker: Worker, state: HeldState, reason: str, *, late: bool = False) -> None:
        """Hold a worker in a state, in the place of the one that it was held in; no call goes there until it is released.

        `late`: see `Hold`.
        """
        worker.hold = Hold(state, reason, late)
        worker.changes += 1
        self._show(worker)

    def release(self, worker: Worker) -> None:
        """Leave the worker to its probes again."""
        worker.hold = None
        worker.changes += 1
        self._show(worker)

    def resumed(self, worker: Worker) -> None:
        """The worker's engine has just been resumed: no probe needs to be waited for."""
        worker.changes += 1
        if worker.observed.state == "paused":
            worker.observed = Observed("ready", "")
        self._show(worker)

    def _enter(self, settings: WorkerSettings) -> Worker:
        worker = Worker(settings)
        self._add(worker)
        return worker

    def _add(self, worker: Worker) -> None:
        if worker.id in self.workers:
            raise ValueError(f"worker {worker.id!r} is in the fleet already")
        self.workers[worker.id] = worker
        worker.relabelled = self.gate.notify

    async def _serve(self, worker: Worker) -> None:
        """Calls end before the connections do, and these before the process."""
        if not worker.settings.command:
            await self._connect(worker)
            return

        def ended() -> None:
            worker.changes += 1
            self._set(worker, "starting" if worker.state == "starting" else "gone", managed.process.down)
            worker.lose_calls()

        managed = Managed(worker.settings, ended)
        worker.process = managed.process
        async with beside(managed.run):
            await self._connect(worker)

    async def _connect(self, worker: Worker) -> None:
        try:
            async with connect(worker.settings) as connection:
                worker.control, worker.http, worker.settle = connection.control, connection.http, connection.settle
                await self._watch(worker, connection)
        finally:
            self._set(worker, "gone", "taken out of the fleet")
            del self.workers[worker.id]

    async def _watch(self, worker: Worker, connection: Connection) -> None:
        failures = certain = 0
        while True:
            failure = await self._look(worker, connection)
            if failure and not failure.certain and worker.administrations and worker.state not in _ABSENT:
                failure = None  # vLLM 0.33: an engine answers nobody while it joins a trainer's group, or receives weights
            failures = failures + 1 if failure else 0
            certain = certain + 1 if failure and failure.certain else 0
            if failure and (failure.certain or failures >= self._probe.failures or worker.state in _ABSENT):
                down = worker.process.down if worker.process else ""
                self._set(worker, "starting" if worker.state == "starting" else "gone", down or str(failure))
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
                changes = worker.changes
                report = await connection.probe.check()
            if worker.changes != changes:
                worker.suspect()
                return None
            worker.find_version(report.policy_version)
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
        if problem := overlap(worker, self.workers.values()):
            raise ProbeFailed(problem, certain=True)
        worker.introduced_at = time.time()
        closed, (worker.lanes, worker.http_closed) = worker.http_closed, await connection.lanes(worker.info.max_model_len)
        if worker.http_closed not in ("", closed):
            log.warning("worker.http_closed", worker=worker.id, reason=worker.http_closed)

    def _set(self, worker: Worker, state: State, reason: str) -> None:
        """Note how a worker is, as its probes have it."""
        if worker.observed.state in _ABSENT and state not in _ABSENT:
            self.greet(worker)
        known, worker.observed = worker.observed.state, Observed(state, reason)
        if state != known:
            self.found(worker)
        self._show(worker)

    def _show(self, worker: Worker) -> None:
        before, known = worker.state, worker.reason
        shown = worker.hold if worker.hold and worker.observed.state not in _ABSENT else worker.observed
        worker.state, worker.reason = shown.state, shown.reason
        if (worker.state, worker.reason) == (before, known):
            return
        log.info("worker.state", worker=worker.id, state=worker.state, before=before, reason=worker.reason)
        if before == worker.state:
            return
        if worker.state in _STILL:
            self._still_since.setdefault(worker.id, time.monotonic())
        elif since := self._still_since.pop(worker.id, None):
            self.stood_still(time.monotonic() - since)
        if before in _ABSENT and worker.state not in _ABSENT:
            self._registry.tell("worker_joined", worker=worker)
        self.ready = tuple(w for w in self.workers.values() if w.state == "ready")
        if worker.state in _ABSENT and before not in _ABSENT:
            self._registry.tell("worker_left", worker=worker)
        self.gate.notify()
