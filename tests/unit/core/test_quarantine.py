"""Quarantines, drains and releases in the middle of pauses and updates: nobody is dropped, killed, forgotten, or let go too soon."""

from functools import partial

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from core.fleet.operations import FleetFailed
from tests.unit.core.engines import administered, broken, refused, serve_http
from tests.unit.core.test_latecomers import fleet_of

# --- in the middle of an update by steps --------------------------------------------------------------------------------------


async def test_who_is_quarantined_by_hand_in_the_middle_of_an_update_stays_in_it():
    async with administered() as fleet:
        await fleet.pause()
        await fleet.start()
        fleet.administration.quarantine(fleet.workers[1], "it smells", by="me")
        await fleet.receive()
        await fleet.finish("8")
        await fleet.resume()
        assert (fleet.states, fleet.workers[1].reason) == (["ready", "quarantined"], "it smells")
        assert [engine.version for engine in fleet.engines] == ["8", "8"]
        await fleet.administration.release(fleet.workers[1], by="me")
        assert (fleet.states, [engine.paused for engine in fleet.engines]) == (["ready", "ready"], [False, False])
        await fleet.update("9")
        assert fleet.states == ["ready", "ready"]


async def test_who_was_quarantined_by_hand_and_fails_in_the_update_has_failed():
    async with administered() as fleet:
        await fleet.start()
        fleet.administration.quarantine(fleet.workers[1], "it smells", by="me")
        fleet.engines[1].fails["update"] = [broken("shapes differ")]
        with pytest.raises(FleetFailed, match="update_weights failed on w1: shapes differ"):
            await fleet.receive()
        await fleet.finish("8")
        assert (fleet.states, fleet.workers[1].reason) == (["ready", "quarantined"], "update_weights: shapes differ")
        await fleet.update("9")
        assert (fleet.states, fleet.workers[1].reason) == (["ready", "quarantined"], "it smells")


async def test_an_update_whose_trainer_dies_ends_also_on_who_was_quarantined_by_hand(autojump_clock):
    async with administered(lease=100.0) as fleet:
        await fleet.start()
        fleet.administration.quarantine(fleet.workers[1], "it smells", by="me")
        await trio.sleep(101)
        assert {worker.reason for worker in fleet.workers} == {"its trainer was silent for 100 s in the middle of a weight update"}
        await fleet.update("9")
        assert (fleet.states, fleet.workers[1].reason) == (["ready", "quarantined"], "it smells")


@pytest.mark.parametrize("out", ["drain", "quarantine"])
async def test_who_is_released_in_the_middle_of_an_update_stays_in_it(out):
    async with administered(1) as fleet:
        await fleet.pause()
        await fleet.start()
        if out == "drain":
            fleet.administration.drain(fleet.workers[0], by="me")
        else:
            fleet.administration.quarantine(fleet.workers[0], "it smells", by="me")
        await fleet.administration.release(fleet.workers[0], by="me")
        assert (fleet.states, fleet.engines[0].asked) == (["updating"], ["pause", "start"])
        await fleet.receive()
        await fleet.finish("8")
        await fleet.resume()
        assert (fleet.states, fleet.engines[0].version) == (["ready"], "8")


async def test_an_update_that_a_released_engine_is_still_in_is_ended_before_the_next():
    async with administered() as fleet:
        await fleet.start()
        fleet.engines[1].fails["finish"] = [broken("the connection broke")]
        with pytest.raises(FleetFailed):
            await fleet.finish("8")
        fleet.engines[1].broken = False  # whoever releases it says so
        await fleet.administration.release(fleet.workers[1], by="me")
        await fleet.update("9")
        assert (fleet.states, fleet.engines[1].version) == (["ready", "ready"], "9")


async def test_who_is_released_in_an_update_in_a_pause_waits_with_the_others_after_it():
    async with administered() as fleet:
        await quarantine_in_an_update(fleet)
        await fleet.start()
        fleet.administration.quarantine(fleet.workers[1], "it smells", by="me")
        await fleet.administration.release(fleet.workers[1], by="me")
        await fleet.receive()
        await fleet.finish("9")
        assert (fleet.states, [engine.paused for engine in fleet.engines]) == (["paused", "paused"], [True, True])
        await fleet.resume()
        assert fleet.states == ["ready", "ready"]


async def test_an_update_that_one_alone_has_refused_is_ended_there_before_the_next():
    async with administered() as fleet:
        await fleet.start()
        fleet.engines[1].fails["update"] = [refused("no such tensor")]
        with pytest.raises(FleetFailed, match="update_weights failed on w1: no such tensor"):
            await fleet.receive()
        await fleet.finish("8")
        await fleet.update("9")
        assert (fleet.states, fleet.engines[1].version) == (["ready", "ready"], "9")


async def test_a_checkpoint_ends_no_update_that_the_engine_thinks_is_running():
    async with administered(1) as fleet:
        await fleet.start()
        fleet.engines[0].fails["finish"] = [broken("the connection broke")]
        with pytest.raises(FleetFailed):
            await fleet.finish("8")
        fleet.engines[0].broken = False
        serve_http(fleet.workers[0], {"results": [None]})
        await fleet.methods.call(fleet.workers, {"method": "reload_weights"}, by="me")
        await fleet.update("9")
        assert (fleet.states, fleet.engines[0].version) == (["ready"], "9")


# --- in a trainer's pause -----------------------------------------------------------------------------------------------------


async def test_the_end_of_a_drain_ends_no_pause():
    async with administered(1) as fleet:
        await fleet.pause()
        fleet.administration.drain(fleet.workers[0], by="me")
        await fleet.administration.release(fleet.workers[0], by="me")
        assert (fleet.states, fleet.engines[0].paused) == (["paused"], True)
        await fleet.resume()
        assert fleet.states == ["ready"]


@pytest.mark.parametrize("when", ["before the pause", "in the pause"])
async def test_who_is_released_in_a_pause_waits_with_the_others(when):
    async with administered() as fleet:
        if when == "in the pause":
            await fleet.pause()
        fleet.administration.quarantine(fleet.workers[0], "it smells", by="me")
        if when == "before the pause":
            await fleet.pause()
        await fleet.administration.release(fleet.workers[0], by="me")
        assert fleet.states == ["paused", "paused"]
        await fleet.resume()
        assert (fleet.states, [engine.paused for engine in fleet.engines]) == (["ready", "ready"], [False, False])


async def quarantine_in_an_update(fleet) -> None:
    """`w1` has failed in an update that has paused it, and the trainer pauses the others after that."""
    await fleet.start()
    fleet.engines[1].fails["update"] = [broken()]
    with pytest.raises(FleetFailed):
        await fleet.receive()
    await fleet.finish("8")
    await fleet.pause()
    assert fleet.states == ["paused", "quarantined"]


@pytest.mark.parametrize("resumed", ["all", "each"])
async def test_who_is_whole_again_after_an_update_in_a_pause_waits_with_the_others(resumed):
    async with administered() as fleet:
        await quarantine_in_an_update(fleet)
        await fleet.update("9")
        assert (fleet.states, [engine.paused for engine in fleet.engines]) == (["paused", "paused"], [True, True])
        if resumed == "all":
            await fleet.resume()
        else:  # w1 was not paused by the trainer, and needs no resume of its own
            await fleet.pausing.resume(fleet.workers[:1], by="me")
            await wait_all_tasks_blocked()
        assert (fleet.states, [engine.paused for engine in fleet.engines]) == (["ready", "ready"], [False, False])


async def test_who_is_whole_again_by_a_checkpoint_in_a_pause_waits_with_the_others():
    async with administered() as fleet:
        await quarantine_in_an_update(fleet)
        fleet.engines[1].broken = False
        for worker in fleet.workers:
            serve_http(worker, {"results": [None]})
        await fleet.methods.call(fleet.workers, {"method": "reload_weights"}, by="me")
        assert (fleet.states, [engine.paused for engine in fleet.engines]) == (["paused", "paused"], [True, True])
        await fleet.resume()
        assert fleet.states == ["ready", "ready"]


async def test_a_late_worker_that_gets_its_weights_in_a_pause_waits_with_the_others():
    async with fleet_of(repeatable=False) as fleet:
        await fleet.update("8")
        await fleet.administered.pause()
        fleet.restart(1)
        assert fleet.states == ["paused", "quarantined"]
        for worker in fleet.workers:
            serve_http(worker, {"results": [None]})
        await fleet.administered.methods.call(fleet.workers, {"method": "reload_weights"}, by="me")
        assert (fleet.states, fleet.workers[1].reason) == (["paused", "paused"], "it waits for the others, which are paused")
        await fleet.administered.resume()
        assert fleet.states == ["ready", "ready"]


async def test_two_that_wait_for_a_third_do_not_wait_for_each_other():
    async with administered(1, 1, 1) as fleet:
        for worker in fleet.workers[1:]:
            fleet.administration.quarantine(worker, "it smells", by="me")
        await fleet.pausing.pause(fleet.workers[:1], "keep", clear_cache=False, by="me")
        for worker in fleet.workers[1:]:
            await fleet.administration.release(worker, by="me")
        assert fleet.states == ["paused"] * 3
        await fleet.pausing.resume(fleet.workers[:1], by="me")
        assert fleet.states == ["ready"] * 3


async def test_a_wake_up_is_a_resume_for_the_quarantined_too():
    async with administered() as fleet:
        await fleet.pause()
        await fleet.start()
        fleet.engines[1].fails["update"] = [broken()]
        with pytest.raises(FleetFailed):
            await fleet.receive()
        await fleet.finish("8")
        await fleet.pausing.wake_up(fleet.workers, [], by="me")
        await fleet.update("9")
        assert (fleet.states, [engine.paused for engine in fleet.engines]) == (["ready", "ready"], [False, False])


async def test_a_pause_that_has_lost_its_trainer_has_lost_it_for_the_quarantined_too(autojump_clock):
    async with fleet_of(lease=100.0) as fleet:
        await fleet.administered.pause()
        fleet.engines[1].fails["update"] = [broken()]
        await fleet.update("8")
        await trio.sleep(101)
        assert fleet.states == ["ready", "quarantined"]
        await fleet.update("9")
        assert (fleet.states, [engine.paused for engine in fleet.engines]) == (["ready", "ready"], [False, False])


# --- when others are paused, who are none of its own ----------------------------------------------------------------------------


async def test_an_update_resumes_whom_it_has_paused_though_somebody_has_paused_another_worker():
    async with fleet_of(1, 1, 1) as fleet:
        administration, pausing = fleet.administered.administration, fleet.administered.pausing
        await pausing.pause(fleet.workers[:1], "keep", clear_cache=False, by="me")
        update = await fleet.update("8", fleet.workers[1:])
        assert (update.failure, fleet.states) == (None, ["paused", "ready", "ready"])
        administration.select_cohort("right", "", ["w1", "w2"], substitution=False, by="me")
        update = await fleet.update("9", fleet.workers[1:])
        assert (update.failure, fleet.states) == (None, ["paused", "ready", "ready"])


async def test_a_late_worker_goes_on_as_soon_as_the_one_that_it_waits_for_does():
    async with fleet_of() as fleet:
        await fleet.update("8")
        await fleet.administered.pausing.pause(fleet.workers[:1], "keep", clear_cache=False, by="me")
        engine = fleet.restart(1)
        await wait_all_tasks_blocked()
        assert (fleet.states, engine.version) == (["paused", "paused"], "8")
        await fleet.administered.pausing.resume(fleet.workers[:1], by="me")
        await wait_all_tasks_blocked()
        assert (fleet.states, engine.paused) == (["ready", "ready"], False)


async def test_a_pause_is_that_of_its_cohort_alone():
    async with fleet_of(1, 1, 1) as fleet:
        administration, pausing = fleet.administered.administration, fleet.administered.pausing
        administration.select_cohort("left", "", ["w0"], substitution=False, by="me")
        administration.select_cohort("right", "", ["w1", "w2"], substitution=True, by="me")
        pause = partial(pausing.pause, mode="keep", clear_cache=False, by="me")
        await pause(administration.select(cohort="left"))
        fleet.restart(2)
        assert fleet.states == ["paused", "ready", "ready"]
        await pause(administration.select(cohort="right"))
        fleet.restart(2)
        assert fleet.states == ["paused", "paused", "paused"]
        await pausing.resume(administration.select(cohort="right"), by="me")
        assert fleet.states == ["paused", "ready", "ready"]
