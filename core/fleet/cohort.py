"""A cohort: the workers that take part in a weight update, in their order, each with its place among the ranks."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from core.fleet.worker import Worker


class Member(Struct, frozen=True):
    """One worker as it was when the cohort was formed."""

    id: str
    #: What tells one process at this address from the next.
    instance: str
    #: Ranks of the members before it.
    offset: int
    #: Its own ranks: those of one replica, times the replicas that it hosts.
    ranks: int
    #: What its engines count from. vLLM 0.33: an engine adds its data-parallel rank, times the ranks of a replica, to the offset that it is
    #: told; so the parts of a data-parallel group are told the same.
    base: int


class Cohort(Struct, frozen=True):
    """The members in the order of the fleet. It never changes: a changed fleet means a new cohort."""

    members: tuple[Member, ...]

    @classmethod
    def of(cls, workers: "Iterable[Worker]") -> "Cohort":
        """The cohort of these workers, each of which was introduced."""
        members: list[Member] = []
        offset = 0
        for worker in workers:
            assert worker.info
            base = offset - worker.info.ranks[0] * worker.info.world_size
            members.append(Member(worker.id, instance_of(worker), offset, worker.world_size, base))
            offset += worker.world_size
        return cls(tuple(members))

    @property
    def ranks(self) -> int:
        """All ranks together."""
        return sum(member.ranks for member in self.members)

    def changes(self, workers: "Mapping[str, Worker]") -> list[str]:
        """What has become of members that are not there as they were, in words; `workers` is the fleet's."""
        found: list[str] = []
        for member in self.members:
            worker = workers.get(member.id)
            if worker is None or not worker.is_there:
                found.append(f"{member.id} is gone")
            elif instance_of(worker) != member.instance:
                found.append(f"{member.id} was replaced by another process")
            elif worker.world_size != member.ranks:
                found.append(f"{member.id} has {worker.world_size} ranks and had {member.ranks}")
        return found


def instance_of(worker: "Worker") -> str:
    """What tells the process from another one at its address. A worker without gRPC names none: then, since when it is there."""
    assert worker.info
    return worker.info.instance_id or f"since {worker.introduced_at}"
