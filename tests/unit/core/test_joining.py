"""A trainer's group: all join at once, each at its place, and one that has changed is waited for by nobody."""

import httpx
import pytest
import trio
from msgspec.structs import replace
from trio.testing import wait_all_tasks_blocked

from core.errors import CallError
from core.fleet.operations import FleetFailed
from tests.unit.core.engines import INIT, administered, broken, restart, serve_http

ALL = ["start", "update", "finish"]


def numbered(cohort, index):
    return {**INIT, "rank_offset": 1 + cohort.members[index].offset}


async def test_all_join_at_once_and_calls_wait_meanwhile():
    async with administered(1, 3) as fleet, trio.open_nursery() as nursery:
        for engine in fleet.engines:
            engine.stalls["init"] = trio.Event()
        nursery.start_soon(lambda: fleet.joining.join(fleet.workers, numbered, by="me"))
        await wait_all_tasks_blocked()
        assert [engine.sent["init"]["rank_offset"] for engine in fleet.engines] == [1, 2]
        assert fleet.states == ["updating", "updating"]
        for engine in fleet.engines:
            engine.stalls["init"].set()
        await wait_all_tasks_blocked()
        assert fleet.states == ["ready", "ready"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda fleet: fleet.rig.move(fleet.workers[1], "gone"), "w1 is gone"),
        (lambda fleet: restart(fleet, fleet.workers[1]), "w1 was replaced by another process"),
    ],
)
async def test_an_update_of_a_group_that_has_changed_is_refused_until_all_have_joined_again(change, words):
    async with administered() as fleet:
        await fleet.joining.join(fleet.workers, numbered, by="me")
        change(fleet)
        with pytest.raises(CallError, match=f"the trainer's group has changed: {words}. Let all join again") as conflict:
            await fleet.start()
        assert conflict.value.status == 409
        workers = fleet.administration.workers()
        await fleet.joining.join(workers, numbered, by="me")
        await fleet.update()
        assert [worker.state for worker in workers] == ["ready"] * len(workers)


async def test_a_worker_that_is_not_in_the_group_is_named():
    async with administered() as fleet:
        await fleet.joining.join(fleet.workers[:1], numbered, by="me")
        with pytest.raises(CallError, match="w1 is not in it"):
            await fleet.start()


async def test_a_part_of_a_group_is_not_updated_and_the_others_are_not_said_to_be_gone():
    async with administered() as fleet:
        await fleet.joining.join(fleet.workers, numbered, by="me")
        with pytest.raises(CallError) as conflict:
            await fleet.updating.start(fleet.workers[:1], by="me")
        assert conflict.value.status == 409
        assert conflict.value.message == (
            "start_weight_update: w1 joined the trainer's group, too, and would be waited for: "
            "ask all of it, or let these join a group of their own"
        )
        assert [engine.asked for engine in fleet.engines] == [["init"], ["init"]]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda fleet: None, ""),
        (lambda fleet: fleet.rig.move(fleet.workers[1], "gone"), "w1 is gone"),
        (lambda fleet: restart(fleet, fleet.workers[1]), "w1 was replaced by another process"),
    ],
)
async def test_a_new_headrace_knows_the_group_with_a_journal(tmp_path, change, words):
    path = str(tmp_path / "journal.sqlite")
    async with administered(1, 1, 1, journal=path) as fleet:
        await fleet.joining.join(fleet.workers, numbered, by="me")
        await fleet.joining.join(fleet.workers[:2], numbered, by="me")
        await fleet.administration.journal.flush()
    async with administered(1, 1, 1, journal=path) as fleet:
        change(fleet)
        both = [worker for worker in fleet.workers[:2] if worker.is_there]
        if words:
            with pytest.raises(CallError, match=f"the trainer's group has changed: {words}. Let all join again"):
                await fleet.updating.start(both, by="me")
        else:
            await fleet.updating.start(both, by="me")


async def test_a_new_headrace_knows_that_a_group_came_to_nothing(tmp_path):
    path = str(tmp_path / "journal.sqlite")
    async with administered(journal=path) as fleet:
        await fleet.joining.join(fleet.workers, numbered, by="me")
        fleet.engines[1].fails["init"] = [broken("timed out")]
        with pytest.raises(FleetFailed):
            await fleet.joining.join(fleet.workers, numbered, by="me")
        await fleet.administration.journal.flush()
    async with administered(journal=path) as fleet:
        await fleet.updating.start(fleet.workers[:1], by="me")


async def test_a_group_that_one_could_not_join_is_none():
    async with administered() as fleet:
        fleet.engines[1].fails["init"] = [broken("timed out")]
        with pytest.raises(FleetFailed, match=r"w1: timed out\. The group is incomplete: let all of them join again"):
            await fleet.joining.join(fleet.workers, numbered, by="me")
        assert fleet.states == ["ready", "ready"]


def bodies_of(*places):
    return [{"method": "init_broadcaster", "kwargs": {"rank_offset": place}} for place in places]


async def test_calls_wait_while_the_workers_join_by_a_method_all_at_once_each_at_its_place():
    async with administered(1, 3) as fleet:
        sent = [serve_http(worker, {"results": [None] * worker.world_size}) for worker in fleet.workers]
        seen = []

        async def join() -> None:
            seen.append(await fleet.joining.join_by_method(fleet.workers, bodies_of(0, 1), by="me"))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(join)
            await wait_for_state(fleet.workers[0], "updating")
            assert fleet.workers[1].reason == "it joins a trainer's group"
        assert seen == [[None] * 4]
        assert fleet.states == ["ready", "ready"]
        assert [body["kwargs"]["rank_offset"] for [body] in sent] == [0, 1]


async def test_weights_do_not_come_through_a_group_that_has_changed():
    async with administered() as fleet:
        sent = [serve_http(worker, {"results": [None]}) for worker in fleet.workers]
        await fleet.joining.join_by_method(fleet.workers, bodies_of(0, 1), by="me")
        assert fleet.workers[1].info
        fleet.workers[1].info = replace(fleet.workers[1].info, instance_id="2")
        with pytest.raises(CallError, match="update_weights_from_path: the trainer's group has changed: w1 was replaced") as conflict:
            await fleet.methods.call(fleet.workers, {"method": "update_weights_from_path"}, by="me")
        assert conflict.value.status == 409
        assert [len(bodies) for bodies in sent] == [1, 1]
        await fleet.methods.call(fleet.workers, {"method": "reload_weights"}, by="me")
        assert [len(bodies) for bodies in sent] == [2, 2], "a checkpoint needs no group"


@pytest.mark.parametrize(("joins", "status"), [(True, 409), (False, 500)])
async def test_an_update_that_came_through_a_group_for_some_is_not_to_be_posted_again(joins, status):
    async with administered() as fleet:
        for worker in fleet.workers:
            serve_http(worker, {"results": [None]})
        if joins:
            await fleet.joining.join_by_method(fleet.workers, bodies_of(0, 1), by="me")
        serve_http(fleet.workers[1], lambda _: httpx.Response(500, json={"error": "out of memory"}))
        with pytest.raises(FleetFailed, match="w1: out of memory") as failed:
            await fleet.methods.call(fleet.workers, {"method": "update_weights_from_path"}, by="me")
        assert failed.value.status == status


async def wait_for_state(worker, state) -> None:
    while worker.state != state:
        await trio.lowlevel.checkpoint()
