"""Data-parallel groups that are spread over several workers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import BadRequest, CallError
from core.fleet.administration import Administration
from core.fleet.cohort import Cohort
from core.fleet.fleet import Fleet
from core.fleet.groups import gaps, in_rank_order, overlap
from core.fleet.worker import Worker
from core.registry import Registry
from core.settings import AdministrationSettings, GateSettings, ProbeSettings, WorkerSettings
from core.testing import make_worker


def part(name: str, *ranks: int, size: int = 4, group: str = "", world_size: int = 1) -> Worker:
    worker = make_worker(name, state="starting", ranks=ranks, data_parallel_size=size, world_size=world_size)
    worker.settings = WorkerSettings(grpc="127.0.0.1:1", id=name, group=group)
    return worker


def there(*workers: Worker) -> Administration:
    fleet = Fleet(ProbeSettings(), GateSettings(), Registry([]))
    administration = Administration(fleet, AdministrationSettings(), {})
    for worker in workers:
        fleet.admit(worker)
    return administration


def ids(workers: list[Worker]) -> list[str]:
    return [worker.id for worker in workers]


def test_parts_stand_together_by_their_ranks_where_the_first_one_stood():
    workers = [make_worker("x"), part("b", 2, 3), make_worker("y"), part("a", 0, 1)]
    assert ids(in_rank_order(workers)) == ["x", "a", "b", "y"]


def test_workers_that_are_complete_keep_their_order():
    workers = [part("b", 0, 1, 2, 3), part("a", 0, 1, 2, 3), make_worker("c")]
    assert ids(in_rank_order(workers)) == ["b", "a", "c"]


@given(st.permutations([("a", "g", 0), ("b", "g", 1), ("c", "h", 0), ("d", "h", 1), ("e", "", None)]))
def test_in_any_order_the_places_of_a_group_follow_one_another(given_order):
    workers = [make_worker(name) if rank is None else part(name, rank, size=2, group=group) for name, group, rank in given_order]
    ordered = ids(in_rank_order(workers))
    assert sorted(ordered) == list("abcde")
    assert ordered.index("b") == ordered.index("a") + 1
    assert ordered.index("d") == ordered.index("c") + 1


def test_parts_of_a_group_are_told_one_offset_because_their_engines_add_their_ranks():
    cohort = Cohort.of([make_worker("x", world_size=3), part("a", 0, 1, world_size=2), part("b", 2, 3, world_size=2)])
    assert [(member.offset, member.base, member.ranks) for member in cohort.members] == [(0, 0, 3), (3, 3, 4), (7, 3, 4)]


def test_a_rank_that_is_there_already_is_refused_in_words():
    first = make_worker("a", ranks=(0, 1), data_parallel_size=4)
    said = "its data-parallel ranks 1 of 4 are on a already: when these are two groups, give each a `group` of its own in the settings"
    assert overlap(part("b", 1, 2), [first]) == said


@pytest.mark.parametrize(
    "other", [part("b", 2, 3), part("b", 0, 1, group="other"), part("b", 0, 1, size=8), part("b", 0, 1, 2, 3), make_worker("b")]
)
def test_what_does_not_overlap_may_come(other: Worker):
    assert overlap(other, [make_worker("a", ranks=(0, 1), data_parallel_size=4)]) == ""


def test_a_gap_is_named():
    assert gaps([part("a", 0), part("b", 2), make_worker("c")]) == [
        "the data-parallel group 'tiny' has 4 ranks, and 1, 3 are missing",
    ]
    assert gaps([part("a", 0, 1), part("b", 2, 3)]) == []


async def test_an_update_of_a_group_with_a_gap_is_refused_and_a_pause_is_not():
    administration = there(part("b", 2, 3))
    assert ids(administration.select()) == ["b"]
    with pytest.raises(CallError, match="0, 1 are missing: an update would wait for them for ever") as refused:
        administration.select(update=True)
    assert refused.value.status == 409


async def test_an_update_of_a_whole_group_has_its_parts_in_order():
    assert ids(there(part("b", 2, 3), part("a", 0, 1)).select(update=True)) == ["a", "b"]


async def test_one_part_alone_can_be_administered():
    assert ids(there(part("b", 2, 3)).select(worker="b", update=True)) == ["b"]


async def test_a_cohort_that_names_the_parts_in_another_order_is_refused():
    administration = there(part("a", 0, 1), part("b", 2, 3))
    with pytest.raises(BadRequest, match="in the order of their ranks: a, b"):
        administration.select_cohort("mine", "", ["b", "a"], substitution=False, by="")


def test_the_capacity_of_a_rank_is_its_share():
    info = make_worker("a", ranks=(0, 1), total_kv_blocks=101).info
    assert info
    assert info.kv_blocks_per_rank == 50
