"""The steps of a weight update that a trainer takes itself, with the rules that keep an engine alive and the fleet of one mind."""

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final

import structlog

from core.errors import BadRequest, CallError
from core.fleet.cohort import Cohort
from core.fleet.control import ControlFailed, WorkerControl
from core.fleet.joining import Joining
from core.fleet.journal import Journal
from core.fleet.judging import judge
from core.fleet.operations import Operation, Operations, digest
from core.fleet.pausing import Pausing
from core.fleet.standings import Standings
from core.fleet.trainer_updates import STEPS, TrainerUpdate, TrainerUpdates
from core.fleet.worker import Worker
from core.settings import AdministrationSettings

log = structlog.stdlib.get_logger()

_STEPS: Final = ("start_weight_update", "start_draft_weight_update", "update_weights", "finish_weight_update")
#: What no transport of vLLM takes for an update.
_NO_UPDATE: Final = {"abandoned": True}


class Updating:
    """A step fails when it fails on one worker: that worker is quarantined, the others go on, and the error says so.

    A step that every worker refused by the request's fault has changed nothing. A collective step takes until everybody has come, or
    `update_timeout` has passed. Whoever has started an update owns it: another client's start takes its place, and then the first one's
    next step is refused.

    Cancellation of any of these: what was asked for is done all the same, and recorded.
    Raises, any of these: `FleetFailed`; `CallError` (409) when the workers are in no state for it.
    """

    def __init__(
        self,
        settings: AdministrationSettings,
        operations: Operations,
        standings: Standings,
        pausing: Pausing,
        joining: Joining,
        trainers: TrainerUpdates,
        journal: Journal,
    ) -> None:
        self._deadline = settings.deadline
        self._timeout = settings.update_timeout
        self._operations = operations
        self._standings = standings
        self._pausing = pausing
        self._joining = joining
        self._trainers = trainers
        self._journal = journal

    async def start(self, workers: Sequence[Worker], *, by: str, draft: bool = False) -> None:
        """Start an update, or one of the draft model's weights alone.

        Workers that are not paused are paused first, frozen as they are, and resumed when it has finished. What an update before has left
        in them is cleared away.
        """

        async def work(operation: Operation) -> None:
            self._joining.demand_group(operation, workers)
            waiting = [worker for worker in workers if not self._is_started(worker, draft=draft, by=by)]
            self._standings.block(waiting, "a weight update is starting")
            try:
                running = await self._pausing.freeze(operation, waiting)
                await self.abandon(operation, waiting)
                before = {worker: self._standings.of(worker).snapshot() for worker in waiting}
                self._open(operation, workers, waiting, draft=draft)
                await self._journal.flush()

                async def start_one(control: WorkerControl) -> None:
                    if ("draft" if draft else "model") in before[control.worker].torn:
                        await control.clear_update(draft=draft)
                    await control.start_weight_update(draft=draft)

                started = await operation.ask(waiting, start_one, deadline=self._timeout, setting="update_timeout")
            finally:
                self._standings.block(waiting, "")
            if started.refused and started.failures:
                for worker in waiting:
                    self._standings.take_back(worker, before[worker], started.failures[worker].reason)
                await self._pausing.go_on(operation, running)
            judge(self._standings, operation, started)

        await self._operations.do("start_draft_weight_update" if draft else "start_weight_update", workers, work, by=by, same=by)

    async def receive(self, workers: Sequence[Worker], info: Mapping[str, Any] | Sequence[Any], *, by: str, alone: bool = False) -> None:
        """Receive weights: one `update_info` for all, or a list with an element for each rank of all workers.

        Those that were lost since the start have failed, unless `alone`: then no others than `workers` are meant.
        """

        async def work(operation: Operation) -> None:
            members = self._members(operation, workers)
            shares = _shares(Cohort.of(workers) if alone else self._cohort(workers, members), info)
            opened = () if alone else self._standings.opened_on(members)

            async def receive_one(control: WorkerControl) -> None:
                await control.update_weights(shares[control.worker.id])

            received = await operation.ask(members, receive_one, deadline=self._timeout, setting="update_timeout")
            for worker in members:
                self._standings.of(worker).received = True
            for worker in received.failures:  # vLLM 0.33: that has ended the update
                self._standings.of(worker).session = worker in received.refusals
            judge(self._standings, operation, received, opened)

        await self._operations.do("update_weights", workers, work, by=by, same=digest([info, by]))

    async def finish(self, workers: Sequence[Worker], version: str | None, *, by: str, alone: bool = False) -> None:
        """Finish the update, label the weights, and resume those that the start had to pause.

        Workers that were not there at the start have missed it: they are quarantined until the next one. `alone`: see `receive`.
        """

        async def finish_one(control: WorkerControl) -> str:
            await control.finish_weight_update(version)
            await control.forget_encoded_media()
            label = await control.policy_version()
            if version is not None and label != version:
                cause = CallError(HTTPStatus.INTERNAL_SERVER_ERROR, f"it labels its weights {label!r} afterwards")
                raise ControlFailed(control.worker.id, "finish_weight_update", cause)
            return label

        async def work(operation: Operation) -> None:
            members = self._members(operation, workers)
            opened = () if alone else self._standings.opened_on(members)
            for update in self._standings.opened_on(members):
                update.version = version
            finished = await operation.ask(members, finish_one, deadline=self._timeout, setting="update_timeout")
            for worker, label in finished.good.items():
                worker.policy_version = label
            if not finished.refused:
                for worker in workers:
                    if worker not in members and not self._standings.of(worker).failed:
                        self._standings.hold_out(worker, "it came while the other workers were updated")
            self._standings.renew([*finished.good], workers, operation.started, version)
            await self._pausing.go_on(operation, finished.good)
            judge(self._standings, operation, finished, opened)

        await self._operations.do("finish_weight_update", workers, work, by=by, same=digest([version, by]))

    async def label(self, workers: Sequence[Worker], version: str, *, by: str) -> None:
        """Label the weights that are there with a policy version."""

        async def work(operation: Operation) -> None:
            if self._standings.opened_on(workers):
                self._trainers.demand_own(operation.name, by)
            labelled = await operation.ask(workers, lambda control: control.set_policy_version(version), deadline=self._deadline)
            for worker in labelled.good:
                worker.policy_version = version
            self._standings.current.relabel(labelled.good, version)
            labelled.demand_all(operation.name, "The other workers have the new label")

        await self._operations.do("update_weight_version", workers, work, by=by, same=digest([version, by]))

    async def give_up(self, update: TrainerUpdate, *, by: str) -> None:
        """End an update that its trainer won't: who is in the middle of it is quarantined. A step that runs ends now."""
        members = [worker for worker in update.members if worker.is_there]
        for operation in self._operations.on(members):
            if operation.name in (*_STEPS, f"collective_rpc {update.transport}"):
                operation.give_up(by)

        async def work(operation: Operation) -> None:
            await self.break_off(operation, [worker for worker in members if worker in update.members], f"given up by {by}")

        await self._operations.do("give_up", members, work, by=by, same=update.id, note={"id": update.id})

    async def break_off(self, operation: Operation, workers: Sequence[Worker], reason: str) -> None:
        """Quarantine, as a part of an operation, those on which an update is running."""
        for update in self._standings.opened_on(workers):
            update.taken = reason
        await self.abandon(operation, workers)
        for worker in workers:
            self._standings.fail(worker, reason)

    async def abandon(self, operation: Operation, workers: Sequence[Worker]) -> None:
        """End, as a part of an operation, an update that nobody will finish.

        vLLM 0.33 has no word for that, and starts no other one before; but an update that fails ends it.
        """
        open_ = [worker for worker in workers if self._standings.of(worker).session]
        await operation.ask(open_, lambda control: control.update_weights(_NO_UPDATE), deadline=self._deadline)
        for worker in open_:
            self._standings.of(worker).session = False

    def _open(self, operation: Operation, workers: Sequence[Worker], waiting: Sequence[Worker], *, draft: bool) -> None:
        """Begin on those that wait for it the update that was started on the others before, or a new one."""
        others = self._standings.opened_on(worker for worker in workers if worker not in waiting)
        former = [update for update in self._standings.opened_on(waiting) if update not in others]
        if former:
            operation.note = {"replaces": [{"id": update.id, "by": update.by} for update in former]}
            log.warning("update.replaced", by=operation.by, replaces=[update.id for update in former], of=[one.by for one in former])
        if waiting:
            opened = next(iter(others), None) or self._trainers.begin(STEPS, waiting, by=operation.by)
            for worker in waiting:
                self._standings.begin(worker, by=operation.by, draft=draft, opened=opened)

    def _is_started(self, worker: Worker, *, draft: bool, by: str) -> bool:
        """Whether it is where a start of the same client leads: one that failed on others may be repeated."""
        standing = self._standings.of(worker)
        mine = standing.opened is not None and standing.opened.by == by
        return mine and standing.updating and not standing.received and standing.draft == draft

    def _cohort(self, workers: Sequence[Worker], members: Sequence[Worker]) -> Cohort:
        """The cohort that the trainer has in mind: that of the start, whoever was lost since."""
        ids = {worker.id for worker in members}
        started = (opened.cohort for opened in self._standings.opened_on(members))
        return next((cohort for cohort in started if ids <= {member.id for member in cohort.members}), Cohort.of(workers))

    def _members(self, operation: Operation, workers: Sequence[Worker]) -> list[Worker]:
        """The workers on which an update is running; there must be one, and it must not be one that took the place of his who asks."""
        self._trainers.demand_own(operation.name, operation.by)
        members = [worker for worker in workers if self._standings.of(worker).updating]
        if not members:
            failed = "".join(f"; {worker.id}: {reason}" for worker in workers if (reason := self._standings.of(worker).failed))
            raise CallError(
                HTTPStatus.CONFLICT, f"{operation.name}: no weight update is running: start one first (/start_weight_update){failed}"
            )
        return members


def _shares(cohort: Cohort, info: Mapping[str, Any] | Sequence[Any]) -> dict[str, Any]:
    """What each member gets of an `update_info`."""
    if isinstance(info, Mapping):
        return {member.id: info for member in cohort.members}
    if len(info) != cohort.ranks:
        text = f"update_info: {len(info)} objects for {cohort.ranks} ranks; as a list it has one for each"
        raise BadRequest(text, param="update_info")
    return {member.id: info[member.offset : member.offset + member.ranks] for member in cohort.members}
