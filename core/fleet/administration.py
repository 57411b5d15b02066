"""The administration of the fleet: who takes part, what is done to them, and what happens when nobody comes back for them."""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final, TypeVar

import structlog
import trio

from core.errors import BadRequest, CallError, NotFound, NoWorker
from core.fleet.arrivals import Arrivals
from core.fleet.cohorts import Cohorts, NamedCohort
from core.fleet.control import WorkerControl
from core.fleet.current import CurrentWeights
from core.fleet.fleet import Fleet
from core.fleet.groups import gaps, in_rank_order
from core.fleet.joining import Joining
from core.fleet.journal import Journal
from core.fleet.latecomers import Latecomers
from core.fleet.methods import Methods
from core.fleet.operations import FleetFailed, Operation, Operations
from core.fleet.pausing import Pausing
from core.fleet.standings import Standings
from core.fleet.trainer_updates import TrainerUpdate, TrainerUpdates
from core.fleet.transport import WeightTransport
from core.fleet.update import Transaction
from core.fleet.updates import Updates
from core.fleet.updating import Updating
from core.fleet.worker import Worker
from core.settings import AdministrationSettings

log = structlog.stdlib.get_logger()
T = TypeVar("T")

#: For workers to be resumed when headrace ends.
_LAST_SECONDS: Final = 2.0


class Administration:
    """`pausing`, `joining`, `updating`, `methods` and `updates` act on workers that `select` has given; `run` must be running."""

    def __init__(self, fleet: Fleet, settings: AdministrationSettings, transports: Mapping[str, WeightTransport]) -> None:
        self._fleet = fleet
        self.aborts = fleet.aborts
        self._settings = settings
        self.journal = Journal(settings.journal)
        self.cohorts = Cohorts(fleet, self.journal)
        self.current = CurrentWeights(fleet, self.cohorts, self.journal)
        self._standings = Standings(fleet, self.journal, self.current)
        arrivals = Arrivals(self.journal, self._standings)
        fleet.greet, fleet.found = arrivals.greet, arrivals.found
        self._operations = Operations(settings, self.journal)
        self._operations.ended = self._ended
        self._operations.left = lambda operation: self._standings.touch(self._there(operation.workers))
        self.pausing = Pausing(settings, self._operations, self._standings)
        self.joining = Joining(settings, self._operations, self._standings, self.journal)
        self.trainers = TrainerUpdates(self.journal)
        self.methods = Methods(settings, self._operations, self._standings, self.pausing, self.joining, self.trainers)
        self.updating = Updating(settings, self._operations, self._standings, self.pausing, self.joining, self.trainers, self.journal)
        transaction = Transaction(settings, self._standings, self.pausing, self.joining, self.updating, self.journal)
        self.updates = Updates(self._operations, transaction, self.trainers, self.journal, transports)
        self._work, self._stopped = trio.CancelScope(), trio.Event()
        self._latecomers = Latecomers(self._standings, self._operations, self.pausing, self.updates)

    async def run(self) -> None:
        """Run the operations, end the leases, write the journal. Cancellation ends the operations where they stand."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.journal.run)
            with self._work:
                async with trio.open_nursery() as working:
                    working.start_soon(self._operations.run)
                    working.start_soon(self.updates.run)
                    working.start_soon(self._latecomers.run)
                    working.start_soon(self._end_leases)
            self._stopped.set()

    async def end(self) -> None:
        """End the operations where they stand, tell whoever waits for them, and resume those that headrace has paused for an update, and
        whose weights are whole. Lasts some seconds at most.

        Cancellation: who wasn't resumed yet stays paused; the journal has it.
        """
        self.updates.stop()
        self._work.cancel()
        with trio.move_on_after(_LAST_SECONDS):
            await self._stopped.wait()
            await self.pausing.leave(self._there(self._fleet.workers.values()))

    def select(self, *, worker: str = "", cohort: str = "", model: str = "", update: bool = False, by: str = "") -> list[Worker]:
        """One worker, the members of a cohort, or the workers of a model, that are there, in rank order. Their leases begin anew.

        For an update a cohort must be whole, or allow for substitution, which `by` then stands for in the journal.

        Raises: `BadRequest` when both a cohort and a model are named, or a model must be; `NotFound`; `NoWorker`; `CallError` (409) for
        a cohort, or a data-parallel group, that isn't whole.
        """
        if worker:
            return self.worker(worker)
        if not cohort:
            found = self.workers(model)
        elif model:
            raise BadRequest("cohort: it has its model already; don't name both", param="cohort")
        else:
            found = self.cohorts.whole(cohort, by=by) if update else self.cohorts.present(cohort)
            self._standings.touch(found)
        if update and (missing := gaps(found)):
            raise CallError(HTTPStatus.CONFLICT, f"{'; '.join(missing)}: an update would wait for them for ever")
        return found

    def select_cohort(self, name: str, model: str, ids: Sequence[str] | None, *, substitution: bool, by: str) -> NamedCohort:
        """Name the workers of these ids, or all of the model, as they are now; a cohort of that name is replaced.

        Raises: `BadRequest`, `NotFound`, `NoWorker`; `CallError` (409) when one of them is in another cohort.
        """
        workers = self.workers(model) if ids is None else [worker for id_ in ids for worker in self.worker(id_)]
        if not workers:
            raise BadRequest("workers: name at least one", param="workers")
        return self.cohorts.select(name, model or workers[0].models[0], workers, substitution=substitution, by=by)

    def workers(self, model: str = "") -> list[Worker]:
        """The workers of a model that are there, in rank order; it needs no name when the fleet serves one. Their leases begin anew.

        Raises: `BadRequest` when it does need one, `NotFound`, `NoWorker`.
        """
        there = self._there(self._fleet.workers.values())
        if not there:
            raise NoWorker("no worker is there")
        names = sorted({worker.models[0] for worker in there})
        if not model and len(names) > 1:
            raise BadRequest(f"model: the fleet serves {', '.join(names)}; name one", param="model")
        found = in_rank_order(worker for worker in there if not model or model in worker.models)
        if not found:
            raise NotFound(f"model: no worker serves {model!r}; the fleet serves {', '.join(names)}", param="model")
        self._standings.touch(found)
        return found

    def worker(self, id_: str) -> list[Worker]:
        """This one alone. Raises: `NotFound`, `NoWorker`."""
        worker = self._fleet.workers.get(id_)
        if worker is None:
            known = ", ".join(self._fleet.workers) or "none"
            raise NotFound(f"there is no worker {id_!r}; the fleet has {known}")
        if not worker.is_there:
            raise NoWorker(f"worker {id_!r} is {worker.state}: {worker.reason}")
        self._standings.touch([worker])
        return [worker]

    async def read(self, name: str, workers: Sequence[Worker], question: Callable[[WorkerControl], Awaitable[T]]) -> list[T]:
        """Ask these workers something that changes nothing; the answers in their order. Cancellation: safe. Raises: `FleetFailed`."""
        answers = await Operation(name, workers, "").ask(workers, question, deadline=self._settings.deadline)
        if answers.failures:
            raise FleetFailed(name, answers.failures)
        return list(answers.good.values())

    async def is_paused(self, workers: Sequence[Worker]) -> bool:
        """Whether the engines of these workers are paused: of those that a pause is for, if there are any. Who is quarantined, or waits
        until the others are resumed, takes no calls though its engine runs.

        Cancellation: safe. Raises: `FleetFailed`.
        """
        standings = {worker: self._standings.of(worker) for worker in workers}
        asked = [worker for worker, standing in standings.items() if not (standing.failed or standing.waits)] or workers
        return all(await self.read("is_paused", asked, lambda control: control.is_paused()))

    async def do(
        self, name: str, workers: Sequence[Worker], question: Callable[[WorkerControl], Awaitable[T]], *, by: str, same: str = ""
    ) -> list[T]:
        """Let these workers do what has no part in pauses and updates, in turn with them.

        Cancellation: it is done all the same.
        Raises: `FleetFailed`.
        """

        async def work(operation: Operation) -> list[T]:
            answers = await operation.ask(workers, question, deadline=self._settings.deadline)
            answers.demand_all(name, "The other workers did it")
            return list(answers.good.values())

        return await self._operations.do(name, workers, work, by=by, same=same)

    def quarantine(self, worker: Worker, reason: str, *, by: str) -> None:
        """Give the worker no more calls, and don't resume it, before it is released. It takes part in updates. Waits for no operation."""
        self.journal.add("quarantine", [worker.id], by=by, reason=reason)
        self._standings.take_out(worker, reason or f"by {by}")

    def drain(self, worker: Worker, reason: str = "", *, by: str) -> None:
        """Give the worker no more calls; those that it has go on. Waits for no operation."""
        self.journal.add("drain", [worker.id], by=by, reason=reason)
        self._standings.drain(worker, f"by {by}{f': {reason}' if reason else ''}")

    async def release(self, worker: Worker, reason: str = "", *, by: str) -> None:
        """Take back a quarantine or a drain, at one's own risk: what its weights are, nobody asks. Raises: `FleetFailed`."""

        async def work(operation: Operation) -> None:
            self._standings.drain(worker, "")
            if self._standings.of(worker).failed:
                self._standings.accept(worker)
            self._standings.show(worker)
            await self.pausing.go_on(operation, [worker])

        await self._operations.do("release", [worker], work, by=by, note={"reason": reason} if reason else None)

    def describe(self) -> list[dict[str, Any]]:
        """The operations in `GET /fleet`."""
        return [operation.describe() for operation in self._operations.running]

    def describe_updates(self) -> list[dict[str, Any]]:
        """The weight updates that run, in `GET /fleet`. One that a trainer takes by steps ends when `ends_in` comes to 0; that is `None`
        while a step runs, which has a time-out of its own.
        """
        driven = [(update, update.workers, None) for update in self.updates.latest() if not update.done.is_set()]
        stepped = [(update, tuple(update.members), self._silence(update)) for update in self.trainers.latest if not update.done]
        return [
            {
                **update.note(),
                "by": update.by,
                "workers": [worker.id for worker in workers],
                "seconds": update.seconds,
                "silent": silent if silent is None else round(silent, 3),
                "ends_in": silent if silent is None else round(self._settings.lease - silent, 3),
            }
            for update, workers, silent in [*driven, *stepped]
        ]

    async def give_up(self, id_: str, *, by: str) -> dict[str, Any]:
        """End a weight update, whoever drives it, and say how it is. Raises: `NotFound`; `CallError` (409) when it is over."""
        shown = self.updates.describe(id_)
        if shown["status"] != "running":
            text = f"update {id_}: it is over, and has {shown['status']}{': ' if shown['error'] else ''}{shown['error'] or ''}"
            raise CallError(HTTPStatus.CONFLICT, text)
        if update := self.trainers.get(id_):
            await self.updating.give_up(update, by=by)
        else:
            self.updates.get(id_).give_up(by)
        return self.updates.describe(id_)

    def _silence(self, update: TrainerUpdate) -> float | None:
        """For how many seconds its trainer has been silent; `None` while a step runs."""
        if not update.members or self._operations.on(update.members):
            return None
        return trio.current_time() - max(self._standings.of(worker).touched for worker in update.members)

    def _ended(self, operation: Operation) -> None:
        self._standings.touch(self._there(operation.workers))
        self.trainers.conclude(operation.workers)
        self._standings.let_go()

    def _there(self, workers: Iterable[Worker]) -> list[Worker]:
        return [worker for worker in workers if worker.is_there]

    def _expiry(self, worker: Worker) -> float:
        standing = self._standings.of(worker)
        paused = standing.paused == "trainer" if standing.failed else self._standings.is_paused(worker)
        left_alone = standing.updating or paused
        if not left_alone or self.pausing.is_busy(worker):
            return float("inf")
        return standing.touched + self._settings.lease

    async def _end_leases(self) -> None:
        while True:
            changed = self._standings.changed
            there = self._there(self._fleet.workers.values())
            with trio.move_on_at(min(map(self._expiry, there), default=float("inf"))):
                await changed.wait()
                continue
            if expired := [worker for worker in there if self._expiry(worker) <= trio.current_time()]:
                await self._end_lease(expired)

    async def _end_lease(self, workers: Sequence[Worker]) -> None:
        """A fleet that sleeps is left alone: whoever has put it to sleep may be using its memory."""
        seconds = self._settings.lease
        log.error("fleet.lease_ended", workers=[worker.id for worker in workers], seconds=seconds)

        async def work(operation: Operation) -> None:
            broken = [worker for worker in workers if self._standings.of(worker).updating]
            await self.updating.break_off(operation, broken, f"its trainer was silent for {seconds:g} s in the middle of a weight update")
            for worker in workers:
                if self._standings.of(worker).unknown and not self._standings.of(worker).failed:
                    self._standings.doubt(worker)
            self._standings.let_go_of(workers)
            sound = [worker for worker in workers if not self._standings.of(worker).failed]
            for worker in sound:
                self._standings.of(worker).waits = False
            await self.pausing.start_again(operation, sound)

        self.pausing.end_waiting(workers, f"its trainer was silent for {seconds:g} s")
        await self._operations.do("lease_ended", workers, work, by="headrace")
