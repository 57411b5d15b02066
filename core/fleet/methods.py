"""Methods of the workers, called on every rank (`/collective_rpc`): some of them are a weight update in themselves."""

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final

from core.fleet.control import WorkerControl
from core.fleet.joining import Joining
from core.fleet.judging import judge
from core.fleet.operations import FleetFailed, Operation, Operations, digest, in_rank_order
from core.fleet.pausing import Pausing
from core.fleet.standings import Standings
from core.fleet.worker import Worker

#: Methods that replace all weights: vLLM's own, and Prime-RL's worker extension's.
REPLACING: Final = frozenset({"reload_weights", "update_weights_from_path"})
#: The one of them that may wait for a trainer's group, which has to be whole then.
_RECEIVING: Final = "update_weights_from_path"


class Methods:
    """Which methods there are is the affair of the workers' engines, and of their extensions."""

    def __init__(self, operations: Operations, standings: Standings, pausing: Pausing, joining: Joining) -> None:
        self._operations = operations
        self._standings = standings
        self._pausing = pausing
        self._joining = joining

    async def call(self, workers: Sequence[Worker], body: Mapping[str, Any], *, by: str, version: str | None = None) -> list[Any]:
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
                self._standings.demand_closed(operation.name, workers)
            grouped = body["method"] == _RECEIVING and self._joining.demand_group(operation, workers)
            if replacing:
                self._standings.block(workers, f"{body['method']} is running")
            try:
                called = await operation.ask(workers, call, deadline=None)
            finally:
                if replacing:
                    self._standings.block(workers, "")
            for worker in called.good if version is not None else ():
                worker.policy_version = version
            if replacing:
                self._standings.renew([*called.good], workers, operation.started, version)
                await self._pausing.go_on(operation, called.good)
                try:
                    judge(self._standings, operation, called)
                except FleetFailed as failed:
                    if grouped and called.good:  # their weights have come: who posts again would wait for a trainer that sends no more
                        failed.status = HTTPStatus.CONFLICT
                    raise
            elif called.failures:
                raise FleetFailed(operation.name, called.failures, "The other workers did it")
            return in_rank_order(called)

        return await self._operations.do(f"collective_rpc {body['method']}", workers, work, by=by, same=digest([body, version]))
