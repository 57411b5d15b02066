"""The group in which a trainer's ranks and the workers' meet: who is in it, and whether it still is what it was."""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

import msgspec

from core.errors import CallError
from core.fleet.cohort import Cohort, instance_of
from core.fleet.control import WorkerControl
from core.fleet.journal import Journal
from core.fleet.operations import FleetFailed, Operation, Operations, digest, in_rank_order
from core.fleet.standings import Standings
from core.fleet.worker import Worker
from core.settings import AdministrationSettings


class Joining:
    """All workers join at the same time, each at its place. It takes until everybody has come, or `update_timeout` has passed.

    Who is in a group lies in the journal: its members keep it for as long as their processes live, also over a restart of headrace.

    Cancellation: what was asked for is done all the same, and recorded.
    Raises: `FleetFailed`.
    """

    def __init__(self, settings: AdministrationSettings, operations: Operations, standings: Standings, journal: Journal) -> None:
        self._timeout = settings.update_timeout
        self._operations = operations
        self._standings = standings
        self._journal = journal
        #: By worker, with whom it has joined a trainer's group at last.
        self._groups: dict[str, Cohort] = {}
        for entry in journal.facts("group"):
            if group := entry.detail["group"]:
                self._groups |= dict.fromkeys(entry.workers, msgspec.convert(group, Cohort))
            else:
                self._forget(entry.workers)

    async def join(self, workers: Sequence[Worker], info: Callable[[Cohort, int], Mapping[str, Any]], *, by: str) -> None:
        """Let every worker join the trainer's group; `info` makes the `init_info` of a member of the cohort, by its index.

        Calls wait meanwhile: an engine that joins does nothing else. From then on these workers, as they are, are who an update is for.
        """
        cohort = Cohort.of(workers)
        infos = {worker.id: info(cohort, index) for index, worker in enumerate(workers)}

        async def join(control: WorkerControl) -> list[Any]:
            await control.init_weight_transfer(infos[control.worker.id])
            return []

        await self._join("init_weight_transfer_engine", workers, cohort, join, by=by, same=digest(infos))

    async def join_by_method(self, workers: Sequence[Worker], bodies: Sequence[Mapping[str, Any]], *, by: str) -> list[Any]:
        """The same by a method behind `collective_rpc`, and with its results; `bodies` are the workers', in their order."""
        shares = {worker.id: body for worker, body in zip(workers, bodies, strict=True)}
        name = f"collective_rpc {bodies[0]['method']}"

        async def join(control: WorkerControl) -> list[Any]:
            return await control.collective_rpc(shares[control.worker.id])

        return await self._join(name, workers, Cohort.of(workers), join, by=by, same=digest(shares))

    def demand_group(self, operation: Operation, workers: Sequence[Worker]) -> bool:
        """Whether the workers are in a group. One that isn't what it was would wait for ever for who is missing: then it raises."""
        groups = [group for worker in workers if (group := self._group_of(worker))]
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

    def demand_joined(self, operation: Operation, workers: Sequence[Worker]) -> None:
        """The same, for an update that can't be done without a group: an engine would start it, and have no weights when it fails."""
        if not self.demand_group(operation, workers):
            text = "its weights come through a trainer's group, and headrace knows of none: let all join one first"
            raise CallError(HTTPStatus.CONFLICT, f"{operation.name}: {text} (/init_weight_transfer_engine)")

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
            self._standings.block(workers, "it joins a trainer's group")
            try:
                joined = await operation.ask(workers, join, deadline=self._timeout, setting="update_timeout")
            finally:
                self._standings.block(workers, "")
            self._note(workers, None if joined.failures else cohort, by)
            if joined.failures:
                failed = FleetFailed(operation.name, joined.failures, "The group is incomplete: let all of them join again")
                if joined.good:  # a 404 says that no engine has such a method
                    failed.status = HTTPStatus.INTERNAL_SERVER_ERROR
                raise failed
            return in_rank_order(joined)

        return await self._operations.do(name, workers, work, by=by, same=same)

    def _group_of(self, worker: Worker) -> Cohort | None:
        """The group that this process is in."""
        group = self._groups.get(worker.id)
        here = (worker.id, instance_of(worker))
        return group if group and any((member.id, member.instance) == here for member in group.members) else None

    def _note(self, workers: Sequence[Worker], group: Cohort | None, by: str) -> None:
        ids = [worker.id for worker in workers]
        if group:
            self._groups |= dict.fromkeys(ids, group)
        else:
            self._forget(ids)
        self._journal.add("group", ids, by=by, of=" ".join(ids), group=msgspec.to_builtins(group))

    def _forget(self, ids: Iterable[str]) -> None:
        for id_ in ids:
            self._groups.pop(id_, None)
