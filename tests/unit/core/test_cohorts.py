"""Cohorts that trainers name: pinned, in rank order, and refused for an update when they aren't what was selected."""

import pytest
from msgspec.structs import replace

from core.errors import BadRequest, CallError, NotFound, NoWorker
from tests.unit.core.engines import AdministeredFleet, administered


def select(fleet: AdministeredFleet, *ids: str, name: str = "a", substitution: bool = False):
    return fleet.administration.select_cohort(name, "", list(ids), substitution=substitution, by="me")


def for_update(fleet: AdministeredFleet, name: str = "a") -> list[str]:
    return [worker.id for worker in fleet.administration.select(cohort=name, update=True)]


def restart(fleet: AdministeredFleet, index: int) -> None:
    worker = fleet.workers[index]
    assert worker.info
    fleet.rig.move(worker, "gone")
    worker.info = replace(worker.info, instance_id="2")
    fleet.rig.move(worker, "ready")


async def test_the_order_of_the_workers_is_that_of_the_ranks():
    async with administered(1, 3, 2) as fleet:
        cohort = select(fleet, "w1", "w0")
        assert [(member.id, member.offset, member.ranks) for member in cohort.members.members] == [("w1", 0, 3), ("w0", 3, 1)]
        assert for_update(fleet) == ["w1", "w0"]
        assert fleet.administration.cohorts.describe() == [
            {"name": "a", "model": "tiny", "workers": ["w1", "w0"], "ranks": 4, "substitution": False, "changes": []}
        ]


async def test_without_a_list_it_is_all_workers_of_the_model():
    async with administered(1, 1, 1, models=["x", "y", "x"]) as fleet:
        with pytest.raises(BadRequest, match="model: the fleet serves x, y; name one"):
            fleet.administration.select_cohort("a", "", None, substitution=False, by="me")
        fleet.administration.select_cohort("a", "x", None, substitution=False, by="me")
        assert for_update(fleet) == ["w0", "w2"]


async def test_a_pause_of_a_cohort_leaves_the_others_running():
    async with administered(1, 1, 1) as fleet:
        select(fleet, "w0", "w2")
        await fleet.pausing.pause(fleet.administration.select(cohort="a"), "keep", clear_cache=False, by="me")
        assert fleet.states == ["paused", "ready", "paused"]
        await fleet.resume()  # what is asked of all is asked of them, too
        assert fleet.states == ["ready"] * 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda fleet: fleet.rig.move(fleet.workers[1], "gone"), "w1 is gone"),
        (lambda fleet: restart(fleet, 1), "w1 was replaced by another process"),
    ],
)
async def test_an_update_of_a_cohort_that_has_changed_is_refused_until_the_trainer_selects_anew(change, words):
    async with administered(1, 1, 1) as fleet:
        select(fleet, "w0", "w1")
        change(fleet)
        with pytest.raises(CallError) as refused:
            for_update(fleet)
        assert refused.value.status == 409
        assert refused.value.message == f"the cohort 'a' isn't what was selected: {words}. Select it anew (POST /fleet/cohorts)"
        assert fleet.administration.cohorts.describe()[0]["changes"] == [words]
        assert fleet.administration.select(cohort="a")  # it can be resumed, say
        select(fleet, "w0", "w2")
        assert for_update(fleet) == ["w0", "w2"]


async def test_with_substitution_an_update_goes_on_with_who_is_there():
    async with administered(1, 1, 1) as fleet:
        select(fleet, "w0", "w1", "w2", substitution=True)
        restart(fleet, 1)
        assert for_update(fleet) == ["w0", "w1", "w2"]
        assert fleet.administration.cohorts.describe()[0]["changes"] == []  # the new process is the member now
        fleet.rig.move(fleet.workers[0], "gone")
        assert for_update(fleet) == ["w1", "w2"]
        fleet.rig.move(fleet.workers[0], "ready")
        assert for_update(fleet) == ["w0", "w1", "w2"]


async def test_a_worker_is_in_one_cohort_only():
    async with administered(1, 1, 1) as fleet:
        select(fleet, "w0", "w1")
        with pytest.raises(CallError, match="workers: 'w1' is in the cohort 'a', and a worker can be in one only") as conflict:
            select(fleet, "w1", "w2", name="b")
        assert conflict.value.status == 409
        fleet.administration.cohorts.drop("a", by="me")
        select(fleet, "w1", "w2", name="b")
        assert [fleet.administration.cohorts.name_of(worker) for worker in fleet.workers] == [None, "b", "b"]


async def test_what_is_wrong_is_refused_by_name():
    async with administered(1, 1, models=["x", "y"]) as fleet:
        with pytest.raises(BadRequest, match="workers: 'w0' is there twice"):
            select(fleet, "w0", "w0")
        with pytest.raises(BadRequest, match="workers: 'w1' serves y, and not 'x'"):
            select(fleet, "w0", "w1")
        with pytest.raises(BadRequest, match="workers: name at least one"):
            select(fleet)
        with pytest.raises(NotFound, match="there is no worker 'w9'; the fleet has w0, w1"):
            select(fleet, "w9")
        select(fleet, "w0")
        with pytest.raises(NotFound, match="cohort: there is none 'b'; there are a"):
            fleet.administration.select(cohort="b")
        with pytest.raises(BadRequest, match="cohort: it has its model already"):
            fleet.administration.select(cohort="a", model="x")
        fleet.rig.move(fleet.workers[0], "gone")
        with pytest.raises(NoWorker, match="no worker of the cohort 'a' is there"):
            fleet.administration.select(cohort="a")


async def test_cohorts_survive_a_restart(tmp_path):
    path = str(tmp_path / "journal.sqlite")
    async with administered(1, 1, 1, journal=path) as fleet:
        select(fleet, "w2", "w1")
        select(fleet, "w0", name="b")
        fleet.administration.cohorts.drop("b", by="me")
        await fleet.administration.journal.flush()
    async with administered(1, 1, 1, journal=path) as fleet:
        assert [cohort["name"] for cohort in fleet.administration.cohorts.describe()] == ["a"]
        assert for_update(fleet) == ["w2", "w1"]
        restart(fleet, 1)
        with pytest.raises(CallError, match="w1 was replaced by another process"):
            for_update(fleet)
