"""The workers that could take a call, worked out once for each kind of call: fleets are large, and change seldom."""

from collections.abc import Iterable, Mapping, Set
from typing import Final

from msgspec import Struct

from core.call import Call
from core.fleet.fleet import Fleet
from core.fleet.worker import Worker
from core.settings import Role
from core.wire.lane import Lane

#: Roles of workers that do a part of calls only: who wants no role in particular doesn't go there.
PARTIAL: Final = frozenset({"prefill", "encode"})
#: Kinds of calls that are remembered; some of what tells them apart is their clients' choice.
_MOST: Final = 1000


class _Kind(Struct, frozen=True):
    model: str
    role: Role | None
    relayed: bool
    rank: int | None
    needs: frozenset[str]


class Candidates(Struct, frozen=True):
    """Of the workers that are ready, those that serve one kind of call."""

    #: In the order of the fleet.
    workers: tuple[Worker, ...]
    #: Those that have a wire for what the call needs, with the lane to take.
    lanes: Mapping[Worker, Lane]
    #: The main names of the models that they serve.
    models: frozenset[str]

    @classmethod
    def among(cls, workers: Iterable[Worker], call: Call) -> "Candidates":
        """Those of these workers that serve calls like this one."""
        found = tuple(worker for worker in workers if serves(worker, call))
        lanes = {worker: lane for worker in found if (lane := worker.lane_for(call.needs))}
        return cls(found, lanes, frozenset(worker.models[0] for worker in found))

    def without(self, workers: Set[Worker]) -> "Candidates":
        """All but these."""
        left = tuple(worker for worker in self.workers if worker not in workers)
        lanes = {worker: lane for worker, lane in self.lanes.items() if worker not in workers}
        return Candidates(left, lanes, frozenset(worker.models[0] for worker in left))


class CandidatesByKind:
    """Remembers the candidates for each kind of call until a worker becomes ready, or ceases to be."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._ready = fleet.ready
        self._known: dict[_Kind, Candidates] = {}

    def of(self, call: Call) -> Candidates:
        """Those for a call like this one."""
        if self._fleet.ready is not self._ready or len(self._known) > _MOST:
            self._ready, self._known = self._fleet.ready, {}
        kind = _Kind(call.model, call.role, call.relayed, call.data_parallel_rank, frozenset(call.needs))
        found = self._known.get(kind)
        if found is None:
            found = self._known[kind] = Candidates.among(self._ready, call)
        return found


def serves(worker: Worker, call: Call) -> bool:
    """Whether the worker is one for this call, ready or not."""
    return (
        serves_model(worker, call)
        and (worker.role not in PARTIAL if call.role is None else worker.role == call.role)
        and (worker.http is not None or not call.relayed)
        and (call.data_parallel_rank is None or has_rank(worker, call.data_parallel_rank))
    )


def serves_model(worker: Worker, call: Call) -> bool:
    """Whether it serves the model that the call names; any, when it names none."""
    return not call.model or call.model in worker.models


def has_rank(worker: Worker, rank: int) -> bool:
    """Whether it has that data-parallel rank, or may have it: a worker without gRPC need not tell its ranks."""
    ranks = worker.info.ranks if worker.info else ()
    return rank in ranks or (worker.settings.grpc is None and len(ranks) < 2)
