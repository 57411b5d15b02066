"""The steps of a weight update on a cohort, with the rules that keep an engine alive and the fleet of one mind."""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from http import HTTPStatus
from typing import Any, Final

import msgspec

from core.errors import BadRequest, CallError
from core.fleet.cohort import Cohort, instance_of
from core.fleet.control import ControlFailed, WorkerControl
from core.fleet.journal import Journal
from core.fleet.opened import Opened
from core.fleet.operations import Answers, FleetFailed, Operation, Operations
from core.fleet.pausing import Pausing
from core.fleet.standing import Standings
from core.fleet.worker import Worker
from core.settings import AdministrationSettings

#: Methods behind `collective_rpc` that replace all weights: vLLM's own, and Prime-RL's worker extension's.
REPLACING: Final = frozenset({"reload_weights", "update_weights_from_path"})
#: The one of them that may wait for a trainer's group, which has to be whole then.
_RECEIVING: Final = "update_weights_from_path"
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
        self, settings: AdministrationSettings, operations: Operations, standings: Standings, pausing: Pausing, journal: Journal
    ) -> None:
        self._deadline = settings.deadline
        self._operations = operations
        self._standings = standings
        self._pausing = pausing
        self._journal = journal

    async def join_group(self, workers: Sequence[Worker], info: Callable[[Cohort, int], Mapping[str, Any]], *, by: str) -> None:
        """Let every worker join the trainer's group; `info` makes the `init_info` of a member of the cohort, by its index.

        Calls wait meanwhile: an engine that joins does nothing else. From then on these workers, as they are, are who an update is for.
        """
        cohort = Cohort.of(workers)
        infos = {worker.id: info(cohort, index) for index, worker in enumerate(workers)}

        async def join(control: WorkerControl) -> list[Any]:
            await control.init_weight_transfer(infos[control.worker.id])
            return []

        await self._join("init_weight_transfer_engine", workers, cohort, join, by=by, same=_digest(infos))

    async def join_group_by_rpc(self, workers: Sequence[Worker], bodies: Sequence[Mapping[str, Any]], *, by: str) -> list[Any]:
        """The same by a method behind `collective_rpc`, and with its results; `bodies` are the workers', in their order."""
        shares = {worker.id: body for worker, body in zip(workers, bodies, strict=True)}
        name = f"collective_rpc {bodies[0]['method']}"

        async def join(control: WorkerControl) -> list[Any]:
            return await control.collective_rpc(shares[control.worker.id])

        return await self._join(name, workers, Cohort.of(workers), join, by=by, same=_digest(shares))

    async def start(self, workers: Sequence[Worker], *, by: str, draft: bool = False) -> None:
        """Start an update, or one of the draft model's weights alone.

        Workers that are not paused are paused first, frozen as they are, and resumed when it has finished.
        """

        async def work(operation: Operation) -> None:
            self.demand_group(operation, workers)
            waiting = [worker for worker in workers if not self._is_started(worker, draft=draft)]
            self._block(waiting, "a weight update is starting")
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
                self._block(waiting, "")
            if started.refused and started.failures:
                for worker in waiting:
                    self._standings.take_back(worker, before[worker])
                await self.go_on(operation, running)
            self._judge(operation, started)

        await self._operations.do("start_draft_weight_update" if draft else "start_weight_update", workers, work, by=by)

    async def receive(self, workers: Sequence[Worker], info: Mapping[str, Any] | Sequence[Any], *, by: str, alone: bool = False) -> None:
        """Receive weights: one `update_info` for all, or a list with an element for each rank of all workers.

        Those that were lost since the start have failed, unless `alone`: then no others than `workers` are meant.
        """
        shares = _shares(workers, info)

        async def work(operation: Operation) -> None:
            members = self._members(operation, workers)
            opened = self._opened(members, alone=alone)
            received = await operation.ask(members, lambda control: control.update_weights(shares[control.worker.id]), deadline=None)
            for worker in members:
                self._standings.of(worker).received = True
            for worker in received.failures:  # vLLM 0.33: that has ended the update
                self._standings.of(worker).session = received.refused
            self._judge(operation, received, opened)

        await self._operations.do("update_weights", workers, work, by=by, same=_digest(info))

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
            opened = self._opened(members, alone=alone)
            finished = await operation.ask(members, finish_one, deadline=None)
            for worker, label in finished.good.items():
                worker.policy_version = label
            if not finished.refused:
                for worker in workers:
                    if worker not in members and not self._standings.of(worker).failed:
                        self._standings.hold_out(worker, "it came while the other workers were updated")
            self._standings.renew([*finished.good], workers, operation.started, version)
            # A draft model that is whole again doesn't make the model whole.
            await self.go_on(operation, [worker for worker in finished.good if not self._standings.of(worker).spoiled])
            self._judge(operation, finished, opened)

        await self._operations.do("finish_weight_update", workers, work, by=by, same=str(version))

    async def collective_rpc(self, workers: Sequence[Worker], body: Mapping[str, Any], *, by: str, version: str | None = None) -> list[Any]:
        """Call a method on every rank; the results in the order of the ranks. One that replaces all weights is an update in itself, and is
        refused (409) while one that a trainer takes by steps is open.

        `version` labels the weights of each worker as soon as it has returned there.
        """
        replacing = body["method"] in REPLACING

        async def call(control: WorkerControl) -> list[Any]:
            results = await control.collective_rpc(body)
            if replacing:
                await control.forget_encoded_media()
            if version is not None:
                await control.set_policy_version(version)
            return results

        async def work(operation: Operation) -> list[Any]:
            if replacing:
                self.demand_closed(operation.name, workers)
            grouped = body["method"] == _RECEIVING and self.demand_group(operation, workers)
            if replacing:
                self._block(workers, f"{body['method']} is running")
            try:
                called = await operation.ask(workers, call, deadline=None)
            finally:
                if replacing:
                    self._block(workers, "")
            for worker in called.good if version is not None else ():
                worker.policy_version = version
            if replacing:
                self._standings.renew([*called.good], workers, operation.started, version)
                await self.go_on(operation, called.good)
                try:
                    self._judge(operation, called)
                except FleetFailed as failed:
                    if grouped and called.good:  # their weights have come: who posts again would wait for a trainer that sends no more
                        failed.status = HTTPStatus.CONFLICT
                    raise
            elif called.failures:
                raise FleetFailed(operation.name, called.failures, "The other workers did it")
            return _in_rank_order(called)

        return await self._operations.do(f"collective_rpc {body['method']}", workers, work, by=by, same=_digest([body, version]))

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

    async def _join(
        self,
        name: str,
        workers: Sequence[Worker],
        cohort: Cohort,
        join: Callable[[WorkerControl], Awaitable[list[Any]]],
        *,
        by: str,
        same: str,
    ) -> list[Any]:
        async def work(operation: Operation) -> list[Any]:
            self._block(workers, "it joins a trainer's group")
            try:
                joined = await operation.ask(workers, join, deadline=None)
            finally:
                self._block(workers, "")
            for worker in workers:
                self._standings.of(worker).group = None if joined.failures else cohort
            if joined.failures:
                failed = FleetFailed(operation.name, joined.failures, "The group is incomplete: let all of them join again")
                if joined.good:  # a 404 says that no engine has such a method
                    failed.status = HTTPStatus.INTERNAL_SERVER_ERROR
                raise failed
            return _in_rank_order(joined)

        return await self._operations.do(name, workers, work, by=by, same=same)

    async def go_on(self, operation: Operation, workers: "Sequence[Worker] | Mapping[Worker, Any]") -> None:
        """Resume, as a part of an operation, those workers that were paused for an update."""
        paused = [worker for worker in workers if self._standings.of(worker).paused == "update"]
        if paused:
            await self._pausing.start_again(operation, paused)

    def _block(self, workers: Sequence[Worker], reason: str) -> None:
        for worker in workers:
            self._standings.of(worker).blocked_by = reason
            self._standings.show(worker)

    def _judge(self, operation: Operation, answers: Answers[Any], opened: Iterable[Opened] = ()) -> None:
        """Quarantine who failed, unless nobody did anything, and who was lost since the update was `opened`. Raises: `FleetFailed`."""
        if answers.failures and answers.refused:
            raise FleetFailed(operation.name, answers.failures, "Nothing has changed")
        failures = dict(answers.failures)
        for one in opened:
            for worker, reason in one.lost().items():
                if worker not in answers.good and worker not in failures:
                    failures[worker] = ControlFailed(worker.id, operation.name, CallError(HTTPStatus.CONFLICT, reason))
                    self._standings.lose(worker, f"{operation.name}: {reason}", one)
        for worker, failure in answers.failures.items():
            self._standings.fail(worker, f"{operation.name}: {failure.reason}")
        if failures:
            raise FleetFailed(operation.name, failures, "Quarantined; the other workers go on")

    def _opened(self, members: Sequence[Worker], *, alone: bool) -> Iterable[Opened]:
        """The starts that have led here, before a finish forgets them."""
        return () if alone else dict.fromkeys(opened for worker in members if (opened := self._standings.of(worker).opened))

    def _is_started(self, worker: Worker, *, draft: bool) -> bool:
        """Whether it is where a start leads: one that failed on others may be repeated."""
        standing = self._standings.of(worker)
        return standing.updating and not standing.received and standing.draft == draft

    def _members(self, operation: Operation, workers: Sequence[Worker]) -> list[Worker]:
        """The workers on which an update is running; there must be one."""
        members = [worker for worker in workers if self._standings.of(worker).updating]
        if not members:
            failed = "".join(f"; {worker.id}: {reason}" for worker in workers if (reason := self._standings.of(worker).failed))
            raise CallError(
                HTTPStatus.CONFLICT, f"{operation.name}: no weight update is running: start one first (/start_weight_update){failed}"
            )
        return members

    def demand_closed(self, name: str, workers: Sequence[Worker], otherwise: str = "") -> None:
        """Raises: `CallError` (409) when a trainer has an update open on one of these, which would be destroyed."""
        for opened in self._opened(workers, alone=False):
            ids = ", ".join(worker.id for worker in workers if self._standings.of(worker).opened is opened)
            text = f"{name}: {opened.by} has started a weight update on {ids} {opened.started} and has not finished it"
            raise CallError(HTTPStatus.CONFLICT, f"{text}: finish it first (/finish_weight_update){otherwise}")

    def demand_group(self, operation: Operation, workers: Sequence[Worker]) -> bool:
        """Whether the workers are in a group. One that isn't what it was would wait for ever for who is missing: then it raises."""
        groups = [group for worker in workers if (group := self._standings.of(worker).group)]
        if not groups:
            return False
        changes = groups[0].changes(self._standings.fleet_workers)
        members = {(member.id, member.instance) for member in groups[0].members}
        asked = {worker.id for worker in workers}
        others = [member.id for member in groups[0].members if member.id not in asked]
        if others and not changes:
            text = f"{operation.name}: {', '.join(others)} joined the trainer's group, too, and would be waited for: ask all of it"
            raise CallError(HTTPStatus.CONFLICT, f"{text}, or let these join a group of their own")
        changes += [f"{worker.id} is not in it" for worker in workers if (worker.id, instance_of(worker)) not in members and not changes]
        if changes:
            text = f"{operation.name}: the trainer's group has changed: {'; '.join(changes)}. Let all join again, as they did at first"
            raise CallError(HTTPStatus.CONFLICT, text)
        return True


def _shares(workers: Sequence[Worker], info: Mapping[str, Any] | Sequence[Any]) -> dict[str, Any]:
    """What each worker gets of an `update_info`."""
    if isinstance(info, Mapping):
        return {worker.id: info for worker in workers}
    cohort = Cohort.of(workers)
    if len(info) != cohort.ranks:
        text = f"update_info: {len(info)} objects for {cohort.ranks} ranks; as a list it has one for each"
        raise BadRequest(text, param="update_info")
    return {member.id: info[member.offset : member.offset + member.ranks] for member in cohort.members}


def _in_rank_order(answers: Answers[list[Any]]) -> list[Any]:
    return [result for results in answers.good.values() for result in results]


def _digest(value: Any) -> str:
    """Equal for equal requests."""
    return blake2b(msgspec.json.encode(value, order="deterministic"), digest_size=16).hexdigest()
