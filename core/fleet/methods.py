"""Methods of the workers, called on every rank (`/collective_rpc`): some of them are a weight update in themselves."""

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final

from core.fleet.control import WorkerControl
from core.fleet.joining import Joining
from core.fleet.judging import judge
from core.fleet.operations import FleetFailed, Operation, Operations, digest, in_rank_order
from core.fleet.pausing import Pausing
from core.fleet.repeating import options_of
from core.fleet.standings import Standings
from core.fleet.trainer_updates import TrainerUpdates
from core.fleet.worker import Worker
from core.settings import AdministrationSettings

#: Methods that replace all weights: vLLM's own, and Prime-RL's worker extension's.
REPLACING: Final = frozenset({"reload_weights", "update_weights_from_path"})
#: The one of them that may wait for a trainer's group, which has to be whole then.
_RECEIVING: Final = "update_weights_from_path"


class Methods:
    """Which methods there are is the affair of the workers' engines, and of their extensions."""

    def __init__(
        self,
        settings: AdministrationSettings,
        operations: Operations,
        standings: Standings,
        pausing: Pausing,
        joining: Joining,
        trainers: TrainerUpdates,
    ) -> None:
        self._timeout = settings.update_timeout
        self._operations = operations
        self._standings = standings
        self._pausing = pausing
        self._joining = joining
        self._trainers = trainers

    async def call(self, workers: Sequence[Worker], body: Mapping[str, Any], *, by: str, version: str | None = None) -> list[Any]:
        """Call a method on every rank; the results in the order of the ranks. One that replaces all weights is an update in itself, and is
        refused (409) while one that a trainer takes by steps is open.

        `version` labels the weights of each worker as soon as it has returned there.
        """
        name, same = f"collective_rpc {body['method']}", digest([body, version])

        async def call(control: WorkerControl) -> list[Any]:
            results = await control.collective_rpc(body)
            if version is not None:
                await control.set_policy_version(version)
            return results

        async def work(operation: Operation) -> list[Any]:
            called = await operation.ask(workers, call, deadline=self._timeout, setting="update_timeout")
            for worker in called.good if version is not None else ():
                worker.policy_version = version
            called.demand_all(operation.name, "The other workers did it")
            return in_rank_order(called)

        async def replace(operation: Operation) -> list[Any]:
            return await self._replace(operation, workers, body, version)

        return await self._operations.do(name, workers, replace if body["method"] in REPLACING else work, by=by, same=same)

    async def _replace(self, operation: Operation, workers: Sequence[Worker], body: Mapping[str, Any], version: str | None) -> list[Any]:
        self._standings.demand_closed(operation.name, workers)
        grouped = body["method"] == _RECEIVING and self._joining.demand_group(operation, workers)
        torn = [worker for worker in workers if "model" in self._standings.of(worker).torn]

        async def replace(control: WorkerControl) -> list[Any]:
            if control.worker in torn:
                await control.clear_reload()
            self._standings.of(control.worker).torn.add("model")
            results = await control.collective_rpc(body)
            await control.forget_encoded_media()
            if version is not None:
                await control.set_policy_version(version)
            return results

        update = self._trainers.begin(body["method"], workers, by=operation.by, version=version)
        self._standings.block(workers, f"{body['method']} is running")
        try:
            called = await operation.ask(workers, replace, deadline=self._timeout, setting="update_timeout")
        finally:
            self._standings.block(workers, "")
        for worker in called.good:
            update.leave(worker)
            if version is not None:
                worker.policy_version = version
        for worker, failure in called.failures.items():
            update.leave(worker, failure.reason, unchanged=called.refused)
            if failure.status == HTTPStatus.NOT_FOUND and worker not in torn:  # its engines have no such method
                self._standings.of(worker).torn.discard("model")
        again = None if grouped else options_of(body)
        self._standings.renew([*called.good], workers, operation.started, version, body["method"] if again else "", again)
        await self._pausing.go_on(operation, called.good)
        try:
            judge(self._standings, operation, called)
        except FleetFailed as failed:
            if grouped and called.good:  # their weights have come: who posts again would wait for a trainer that sends no more
                failed.status = HTTPStatus.CONFLICT
            raise
        return in_rank_order(called)
