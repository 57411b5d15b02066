"""The steps of a weight update that a trainer takes itself, with the rules that keep an engine alive and the fleet of one mind."""

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final

from core.errors import BadRequest, CallError
from core.fleet.cohort import Cohort
from core.fleet.control import ControlFailed, WorkerControl
from core.fleet.joining import Joining
from core.fleet.journal import Journal
from core.fleet.judging import judge
from core.fleet.opened import Opened
from core.fleet.operations import FleetFailed, Operation, Operations, digest
from core.fleet.pausing import Pausing
from core.fleet.standings import Standings
from core.fleet.worker import Worker
from core.settings import AdministrationSettings

#: What no transport of vLLM takes for an update.
_NO_UPDATE: Final = {"abandoned": True}


class Updating:
    """A step fails when it fails on one worker: that worker is quarantined, the others go on, and the error says so.

    A step that every worker refused by the request's fault has changed nothing. None of the steps has a deadline: a collective one takes
    until everybody has come.

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
        journal: Journal,
    ) -> None:
        self._deadline = settings.deadline
        self._operations = operations
        self._standings = standings
        self._pausing = pausing
        self._joining = joining
        self._journal = journal

    async def start(self, workers: Sequence[Worker], *, by: str, draft: bool = False) -> None:
        """Start an update, or one of the draft model's weights alone.

        Workers that are not paused are paused first, frozen as they are, and resumed when it has finished.
        """

        async def work(operation: Operation) -> None:
            self._joining.demand_group(operation, workers)
            waiting = [worker for worker in workers if not self._is_started(worker, draft=draft)]
            self._standings.block(waiting, "a weight update is starting")
            try:
                running = await self._pausing.freeze(operation, waiting)
                await self.abandon(operation, waiting)
                before = {worker: self._standings.weights(worker) for worker in waiting}
                opened = Opened(by, waiting)
                for worker in waiting:
                    self._standings.begin(worker, draft=draft, opened=opened)
                await self._journal.flush()
                started = await operation.ask(waiting, lambda control: control.start_weight_update(draft=draft), deadline=None)
            finally:
                self._standings.block(waiting, "")
            if started.refused and started.failures:
                for worker in waiting:
                    self._standings.take_back(worker, before[worker])
                await self._pausing.go_on(operation, running)
            judge(self._standings, operation, started)

        await self._operations.do("start_draft_weight_update" if draft else "start_weight_update", workers, work, by=by)

    async def receive(self, workers: Sequence[Worker], info: Mapping[str, Any] | Sequence[Any], *, by: str, alone: bool = False) -> None:
        """Receive weights: one `update_info` for all, or a list with an element for each rank of all workers.

        Those that were lost since the start have failed, unless `alone`: then no others than `workers` are meant.
        """

        async def work(operation: Operation) -> None:
            members = self._members(operation, workers)
            shares = _shares(Cohort.of(workers) if alone else self._cohort(workers, members), info)
            opened = () if alone else self._standings.opened_on(members)
            received = await operation.ask(members, lambda control: control.update_weights(shares[control.worker.id]), deadline=None)
            for worker in members:
                self._standings.of(worker).received = True
            for worker in received.failures:  # vLLM 0.33: that has ended the update
                self._standings.of(worker).session = received.refused
            judge(self._standings, operation, received, opened)

        await self._operations.do("update_weights", workers, work, by=by, same=digest(info))

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
            finished = await operation.ask(members, finish_one, deadline=None)
            for worker, label in finished.good.items():
                worker.policy_version = label
            if not finished.refused:
                for worker in workers:
                    if worker not in members and not self._standings.of(worker).failed:
                        self._standings.hold_out(worker, "it came while the other workers were updated")
            self._standings.renew([*finished.good], workers, operation.started, version)
            await self._pausing.go_on(operation, finished.good)
            judge(self._standings, operation, finished, opened)

        await self._operations.do("finish_weight_update", workers, work, by=by, same=str(version))

    async def label(self, workers: Sequence[Worker], version: str, *, by: str) -> None:
        """Label the weights that are there with a policy version."""

        async def work(operation: Operation) -> None:
            labelled = await operation.ask(workers, lambda control: control.set_policy_version(version), deadline=self._deadline)
            for worker in labelled.good:
                worker.policy_version = version
            self._standings.current.relabel(labelled.good, version)
            if labelled.failures:
                raise FleetFailed(operation.name, labelled.failures, "The other workers have the new label")

        await self._operations.do("update_weight_version", workers, work, by=by, same=version)

    async def abandon(self, operation: Operation, workers: Sequence[Worker]) -> None:
        """End, as a part of an operation, an update that nobody will finish.

        vLLM 0.33 has no word for that, and starts no other one before; but an update that fails ends it.
        """
        open_ = [worker for worker in workers if self._standings.of(worker).session]
        await operation.ask(open_, lambda control: control.update_weights(_NO_UPDATE), deadline=self._deadline)
        for worker in open_:
            self._standings.of(worker).session = False

    def _is_started(self, worker: Worker, *, draft: bool) -> bool:
        """Whether it is where a start leads: one that failed on others may be repeated."""
        standing = self._standings.of(worker)
        return standing.updating and not standing.received and standing.draft == draft

    def _cohort(self, workers: Sequence[Worker], members: Sequence[Worker]) -> Cohort:
        """The cohort that the trainer has in mind: that of the start, whoever was lost since."""
        ids = {worker.id for worker in members}
        started = (opened.cohort for opened in self._standings.opened_on(members))
        return next((cohort for cohort in started if ids <= {member.id for member in cohort.members}), Cohort.of(workers))

    def _members(self, operation: Operation, workers: Sequence[Worker]) -> list[Worker]:
        """The workers on which an update is running; there must be one."""
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
