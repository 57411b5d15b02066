"""Pausing and resuming a cohort, putting it to sleep and waking it up."""

from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import NamedTuple

import structlog
import trio

from core.errors import CallError
from core.fleet.control import ControlFailed, PauseMode, WorkerControl
from core.fleet.operations import FleetFailed, Operation, Operations, told
from core.fleet.standings import DISCARDED, Standings
from core.fleet.worker import Worker
from core.settings import AdministrationSettings

log = structlog.stdlib.get_logger()

#: Turns of the event loop, within which it has heard of a client that has gone, and has cancelled its call.
_TICKS = 10


class Woken(NamedTuple):
    """What has come of waking workers up."""

    #: Whether all that were asked are awake.
    awake: bool
    #: Who wasn't asked, because its weights aren't whole, and sleeps on: why, by id.
    asleep: Mapping[str, str]


class _Waiting:
    """A pause that waits for calls; what ends it before they do."""

    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self.ended_by = ""


class Pausing:
    """All workers or none.

    Cancellation of any of these: what was asked for is done all the same, and recorded.
    Raises, any of these: `FleetFailed`; `CallError` (409) when the workers are in no state for it.
    """

    def __init__(self, settings: AdministrationSettings, operations: Operations, standings: Standings) -> None:
        self._deadline = settings.deadline
        self._operations = operations
        self._standings = standings
        self._waiting: dict[Operation, _Waiting] = {}

    async def pause(self, workers: Sequence[Worker], mode: PauseMode, *, clear_cache: bool, by: str) -> None:
        """Pause every worker that isn't quarantined, or none: the gate closes first, and when one fails, those that were running go on.

        When all are quarantined nobody takes calls, and it succeeds, so that an update can follow that heals them.

        `wait` has no deadline: it lasts as long as the longest call, unless a resume or `end_waiting` ends it (409). In the middle of an
        update only `keep` is taken, whose engine does nothing: calls that are frozen there can neither go on nor, with data-parallel ranks,
        be ended without a forward pass.
        """

        async def work(operation: Operation) -> None:
            if mode != "keep":
                self._demand_whole(operation, workers, "finish it first (/finish_weight_update), or pause with mode=keep")
            sound = self._sound(workers)
            if not sound:
                await self._still(operation, workers, clear_cache=clear_cache)
            running = [worker for worker in sound if not self._is_still(worker)]
            again = [worker for worker in sound if worker not in running]
            for worker in running:
                self._standings.of(worker).paused, self._standings.of(worker).left_frozen = "trainer", False
                self._standings.show(worker)
            waiting = _Waiting()
            if mode == "wait":
                self._waiting[operation] = waiting
            try:
                await self.stop(operation, running, mode, clear_cache=clear_cache, also=again, scope=waiting.scope)
            finally:
                self._waiting.pop(operation, None)
            if waiting.scope.cancelled_caught:
                await self.start_again(operation, running)
                raise CallError(HTTPStatus.CONFLICT, f"{operation.name}: ended before all calls had: {waiting.ended_by}")
            for worker in again:
                self._standings.of(worker).paused = "trainer"
                self._standings.show(worker)

        await self._operations.do("pause", workers, work, by=by, same=f"{mode} {clear_cache}")

    def end_waiting(self, workers: Sequence[Worker], reason: str) -> None:
        """End, for that reason, pauses of one of these workers that still wait for calls; whoever they have paused goes on."""
        for operation in self._operations.on(workers):
            if waiting := self._waiting.get(operation):
                waiting.ended_by = reason
                waiting.scope.cancel()

    def is_busy(self, worker: Worker) -> bool:
        """Whether an operation runs on this worker, or waits to; not a pause that waits for calls, and that nobody waits for any more."""
        return any(operation.awaited or operation not in self._waiting for operation in self._operations.on([worker]))

    async def stop(
        self,
        operation: Operation,
        workers: Sequence[Worker],
        mode: PauseMode,
        *,
        clear_cache: bool,
        also: Sequence[Worker] = (),
        scope: trio.CancelScope | None = None,
    ) -> None:
        """Pause, as a part of an operation, workers whose standing says already that they are paused; `also` were paused before.

        Calls that their clients have just given up end first: a frozen engine would keep them. When one fails, `workers` go on. When
        `scope` is cancelled nobody is waited for any more; who has heard of the pause may still do it.

        Raises: `FleetFailed`.
        """

        async def pause(control: WorkerControl) -> None:
            await control.worker.settle()
            # A call that is waited for goes on, and nothing may go on with weights that aren't whole, or aren't there.
            standing = self._standings.of(control.worker)
            whole = standing.is_whole and not standing.asleep
            await control.pause(mode if whole or mode == "abort" else "keep", clear_cache=clear_cache)

        for _ in range(_TICKS):
            await trio.lowlevel.checkpoint()
        deadline = None if mode == "wait" else self._deadline
        failures: Mapping[Worker, ControlFailed] = {}
        with scope or trio.CancelScope():
            failures = (await operation.ask([*workers, *also], pause, deadline=deadline)).failures
        if failures:
            # Who failed may have paused all the same.
            silent = await self.start_again(operation, workers)
            but = f", but for those that didn't resume: {told(silent)}" if silent else ""
            raise FleetFailed(operation.name, failures, f"No worker stays paused by this{but}")

    async def freeze(
        self,
        operation: Operation,
        workers: Sequence[Worker],
        mode: PauseMode = "keep",
        *,
        clear_cache: bool = False,
        scope: trio.CancelScope | None = None,
    ) -> list[Worker]:
        """Pause for an update, as a part of an operation, those workers that nobody has paused; gives them. `scope`: see `stop`.

        Raises: `FleetFailed`; then they go on.
        """
        running = [worker for worker in workers if not self._is_still(worker)]
        # Those that somebody has paused behind headrace's back may have been resumed since.
        found = [worker for worker in running if worker.observed.state == "paused" and not self._standings.of(worker).left_frozen]
        running = [worker for worker in running if worker not in found]
        for worker in running:
            standing = self._standings.of(worker)
            standing.paused, standing.left_frozen = "update", False
            self._standings.show(worker)
        self._standings.note_frozen()
        await self.stop(operation, running, mode, clear_cache=clear_cache, also=found, scope=scope)
        for worker in found:
            self._standings.of(worker).paused = "trainer"
        return running

    async def start_again(self, operation: Operation, workers: Sequence[Worker]) -> Mapping[Worker, ControlFailed]:
        """Resume, as a part of an operation, what it has paused, each as soon as it can.

        Gives those that don't, which are left to their probes.
        """

        def let_go(worker: Worker, *, running: bool) -> None:
            self._standings.of(worker).paused, self._standings.of(worker).left_frozen = "", False
            self._standings.show(worker, running=running)

        async def resume(control: WorkerControl) -> None:
            await control.resume()
            let_go(control.worker, running=True)

        resumed = await operation.ask(workers, resume, deadline=self._deadline)
        for worker in resumed.failures:
            let_go(worker, running=False)
        self._standings.note_frozen()
        return resumed.failures

    async def go_on(self, operation: Operation, workers: Iterable[Worker]) -> None:
        """Resume, as a part of an operation, those workers that were paused for an update, and that wait for nobody that isn't."""
        frozen: list[Worker] = []
        for worker in workers:
            standing = self._standings.of(worker)
            standing.waits &= self._standings.is_held_back(worker)
            if standing.is_frozen:
                frozen.append(worker)
        if frozen:
            await self.start_again(operation, frozen)

    async def leave(self, workers: Sequence[Worker]) -> None:
        """Headrace ends: resume those that it has paused for an update, and whose weights are whole. Nothing else may run on them."""
        frozen = [worker for worker in workers if self._standings.of(worker).is_frozen]
        if frozen:
            await self.start_again(Operation("left_paused", frozen, "headrace"), frozen)

    async def resume(self, workers: Sequence[Worker], *, by: str) -> None:
        """Resume every worker but the quarantined ones. Those that fail stay paused, the others go on. A pause of one of them that still
        waits for calls ends.

        Nobody is resumed while a weight update is running on one of them, or one of them sleeps: it may have no weights to run on.
        """

        async def work(operation: Operation) -> None:
            self._demand_whole(operation, workers)
            self._standings.let_go_of(workers)
            sound = self._sound(workers)
            if not sound:
                reasons = "; ".join(f"{worker.id}: {self._standings.of(worker).failed}" for worker in workers)
                raise CallError(HTTPStatus.CONFLICT, f"{operation.name}: every worker is quarantined: {reasons}")
            if asleep := [worker.id for worker in sound if self._standings.of(worker).asleep]:
                text = f"{operation.name}: {', '.join(asleep)} sleep: wake them up first (/wake_up), which resumes them, too"
                raise CallError(HTTPStatus.CONFLICT, text)
            resumed = await operation.ask(sound, lambda control: control.resume(), deadline=self._deadline)
            for worker in resumed.good:
                standing = self._standings.of(worker)
                standing.paused, standing.waits, standing.left_frozen = "", False, False
                self._standings.show(worker, running=True)
            resumed.demand_all(operation.name, "The other workers were resumed")

        self.end_waiting(workers, f"{by} has asked for a resume")
        await self._operations.do("resume", workers, work, by=by)

    async def sleep(self, workers: Sequence[Worker], level: int, mode: PauseMode, *, by: str) -> None:
        """Put every worker to sleep. One that fails is not slept and the others are: level 2 can't be undone, and only an update brings
        weights again.

        Calls on a worker whose weights aren't whole, or sleep already, can't be waited for: they end.
        """

        async def work(operation: Operation) -> None:
            self._demand_whole(operation, workers)
            waited_for = [worker for worker in workers if self._standings.of(worker).is_whole and not self._standings.of(worker).asleep]

            async def sleep(control: WorkerControl) -> None:
                await control.sleep(level, mode if mode == "keep" or control.worker in waited_for else "abort")

            for worker in workers:
                self._standings.sleep(worker, True)
            slept = await operation.ask(workers, sleep, deadline=None)
            for worker in slept.failures:
                self._standings.sleep(worker, False)
            for worker in slept.good if level >= 2 else ():
                self._standings.discard(worker)
            slept.demand_all(operation.name, "The other workers sleep")

        await self._operations.do("sleep", workers, work, by=by, same=f"{level} {mode}")

    async def wake_up(self, workers: Sequence[Worker], tags: Sequence[str], *, by: str) -> Woken:
        """Wake every worker up, as far as `tags` say.

        vLLM 0.33: who is all awake is resumed, also when it was only paused. So while weights are being replaced, or were not replaced
        completely, only they wake up, and only where they sleep; of quarantined workers those whose weights are whole wake up like the
        others, which gives them no calls. Those whose weights a sleep has discarded wake up, too, and are quarantined once they are all
        awake, unless an update has come between; with frozen calls, which would go on without weights, they sleep on.
        """

        async def work(operation: Operation) -> Woken:
            if set(tags) == {"weights"}:
                asked = [worker for worker in workers if self._may_wake(worker)]
            else:
                self._demand_whole(operation, workers)
                asked = [worker for worker in workers if self._may_run(worker)]
            if not asked:
                reasons = "; ".join(f"{worker.id}: {self._standings.of(worker).failed or DISCARDED}" for worker in workers)
                text = f"{operation.name}: no worker's weights are whole: wake these alone (tags=weights) and replace them: {reasons}"
                raise CallError(HTTPStatus.CONFLICT, text)
            woken = await operation.ask(asked, lambda control: control.wake_up(tags), deadline=None)
            paused = await operation.ask(woken.good, lambda control: control.is_paused(), deadline=self._deadline)
            for worker, still in paused.good.items():
                if not still:
                    self._standings.of(worker).paused = ""
                    self._standings.sleep(worker, False)
                    self._standings.show(worker, running=True)
            if not all(paused.good.values()):  # it is a resume, too
                self._standings.let_go_of(workers)
            if failures := {**woken.failures, **paused.failures}:
                raise FleetFailed(operation.name, failures, "The other workers were woken up" if paused.good else "")
            others = {worker: self._standings.of(worker) for worker in workers if worker not in asked}
            asleep = {worker.id: standing.failed or DISCARDED for worker, standing in others.items() if standing.asleep}
            if asleep:
                log.warning("fleet.sleeps_on", workers=asleep)
            return Woken(not any(paused.good.values()), asleep)

        return await self._operations.do("wake_up", workers, work, by=by, same=" ".join(tags))

    async def _still(self, operation: Operation, workers: Sequence[Worker], *, clear_cache: bool) -> None:
        """Pause, as far as they can, workers that take no calls: whom an update heals then waits for the resume as others do."""

        async def pause(control: WorkerControl) -> None:
            await control.worker.settle()
            await control.pause("keep", clear_cache=clear_cache)

        for worker in (await operation.ask(workers, pause, deadline=self._deadline)).good:
            self._standings.of(worker).paused, self._standings.of(worker).left_frozen = "trainer", False

    def _may_wake(self, worker: Worker) -> bool:
        """Whether waking up its weights alone starts no forward pass on half of them."""
        standing = self._standings.of(worker)
        return standing.asleep or not (standing.spoiled or standing.updating)

    def _may_run(self, worker: Worker) -> bool:
        """Whether its engine may run when it is all awake, be it for nobody."""
        standing = self._standings.of(worker)
        return not standing.spoiled or (standing.discarded and not worker.in_flight)

    def _is_still(self, worker: Worker) -> bool:
        standing = self._standings.of(worker)
        return bool(standing.paused) or standing.asleep or standing.updating

    def _demand_whole(
        self, operation: Operation, workers: Sequence[Worker], advice: str = "finish it first (/finish_weight_update)"
    ) -> None:
        updating = [worker.id for worker in workers if self._standings.of(worker).updating]
        if updating:
            text = f"{operation.name}: a weight update is running on {', '.join(updating)}: {advice}"
            raise CallError(HTTPStatus.CONFLICT, text)

    def _sound(self, workers: Sequence[Worker]) -> list[Worker]:
        """The workers that aren't quarantined."""
        return [worker for worker in workers if not self._standings.of(worker).failed]
