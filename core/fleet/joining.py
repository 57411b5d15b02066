"""The group in which a trainer's ranks and the workers' meet: who is in it, and whether it still is what it was."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from core.errors import CallError
from core.fleet.cohort import Cohort, instance_of
from core.fleet.control import WorkerControl
from core.fleet.operations import FleetFailed, Operation, Operations, digest, in_rank_order
from core.fleet.standings import Standings
from core.fleet.worker import Worker


class Joining:
    """All workers join at the same time, each at its place. No deadline: a group is complete when everybody has come.

    Cancellation: what was asked for is done all the same, and recorded.
    Raises: `FleetFailed`.
    """

    def __init__(self, operations: Operations, standings: Standings) -> None:
        self._operations = operations
        self._standings = standings

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
                joined = await operation.ask(workers, join, deadline=None)
            finally:
                self._standings.block(workers, "")
            for worker in workers:
                self._standings.of(worker).group = None if joined.failures else cohort
            if joined.failures:
                failed = FleetFailed(operation.name, joined.failures, "The group is incomplete: let all of them join again")
                if joined.good:  # a 404 says that no engine has such a method
                    failed.status = HTTPStatus.INTERNAL_SERVER_ERROR
                raise failed
            return in_rank_order(joined)

        return await self._operations.do(name, workers, work, by=by, same=same)
