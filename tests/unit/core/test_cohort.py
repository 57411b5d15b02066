"""Cohorts: who is where among the ranks, and what has changed since."""

import pytest
from msgspec.structs import replace

from core.fleet.cohort import Cohort, Member
from tests.unit.core.rig import make_worker


def worker(name, *, world_size=1, replicas=1, instance="1"):
    made = make_worker(name)
    assert made.info
    made.info = replace(made.info, world_size=world_size, ranks=tuple(range(replicas)), instance_id=instance)
    return made


def test_offsets_are_the_ranks_of_the_members_before():
    cohort = Cohort.of([worker("b"), worker("a", world_size=3), worker("c", world_size=2, replicas=2), worker("d")])
    assert cohort.members == (Member("b", "1", 0, 1, 0), Member("a", "1", 1, 3, 1), Member("c", "1", 4, 4, 4), Member("d", "1", 8, 1, 8))
    assert cohort.ranks == 9


def test_nothing_has_changed_when_everybody_is_as_before():
    workers = {name: worker(name) for name in "ab"}
    cohort = Cohort.of(workers.values())
    assert cohort.changes({**workers, "c": worker("c")}) == []
    assert cohort == Cohort.of(workers.values())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda workers: workers.pop("a"), "a is gone"),
        (lambda workers: setattr(workers["a"], "state", "gone"), "a is gone"),
        (lambda workers: workers.update(a=worker("a", instance="2")), "a was replaced by another process"),
        (lambda workers: workers.update(a=worker("a", world_size=2)), "a has 2 ranks and had 1"),
    ],
)
def test_a_member_that_was_lost_or_replaced_is_named(change, words):
    workers = {name: worker(name) for name in "ab"}
    cohort = Cohort.of(workers.values())
    change(workers)
    assert cohort.changes(workers) == [words]


def test_a_worker_that_names_no_process_is_another_one_when_it_comes_anew():
    one = worker("a", instance="")
    cohort = Cohort.of([one])
    one.introduced_at += 1
    assert cohort.changes({"a": one}) == ["a was replaced by another process"]
