"""Data-parallel groups whose replicas are spread over several workers: who belongs together, in which order, and what is missing.

A worker that hosts fewer replicas than its group has is a part of one. Parts of one model are of one group, unless the settings give them
different `group`s. A worker with all replicas of its group is complete by itself.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from core.fleet.worker import Worker


class GroupId(Struct, frozen=True):
    """Which group a part belongs to. Parts that disagree on the size are of different groups."""

    model: str
    name: str
    size: int


def group_of(worker: "Worker") -> GroupId | None:
    """The group that this worker is a part of; `None` when it is complete by itself, or unknown yet."""
    info = worker.info
    if info is None or len(info.ranks) >= info.data_parallel_size:
        return None
    return GroupId(info.models[0], worker.settings.group, info.data_parallel_size)


def in_rank_order(workers: Iterable["Worker"]) -> list["Worker"]:
    """These workers in their order, but the parts of a group together, by their ranks, where its first part stands.

    vLLM 0.33: an engine's place in a trainer's group is its data-parallel rank's, so that those of a group must follow one another.
    """
    given = list(workers)
    places: dict[GroupId, int] = {}
    for place, worker in enumerate(given):
        if group := group_of(worker):
            places.setdefault(group, place)

    def key(numbered: "tuple[int, Worker]") -> tuple[int, int]:
        place, worker = numbered
        group = group_of(worker)
        return (places[group], worker.info.ranks[0]) if group and worker.info else (place, 0)

    return [worker for _, worker in sorted(enumerate(given), key=key)]


def overlap(worker: "Worker", others: Iterable["Worker"]) -> str:
    """Why this worker can't be a part of its group beside these, in words; empty when it can."""
    group = group_of(worker)
    if group is None or worker.info is None:
        return ""
    for other in others:
        if other is worker or not other.is_there or other.info is None or group_of(other) != group:
            continue
        if twice := sorted(set(worker.info.ranks) & set(other.info.ranks)):
            text = f"its data-parallel ranks {_listed(twice)} of {group.size} are on {other.id} already"
            return f"{text}: when these are two groups, give each a `group` of its own in the settings"
    return ""


def gaps(workers: Sequence["Worker"]) -> list[str]:
    """The groups of which only a part is among these workers, and what is missing, in words."""
    found: dict[GroupId, set[int]] = {}
    for worker in workers:
        if (group := group_of(worker)) and worker.info:
            found.setdefault(group, set()).update(worker.info.ranks)
    return [
        f"the data-parallel group {(group.name or group.model)!r} has {group.size} ranks, and {_listed(missing)} are missing"
        for group, ranks in found.items()
        if (missing := sorted(set(range(group.size)) - ranks))
    ]


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
