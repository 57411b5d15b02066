"""Workers that are lost, replaced, or come in the middle of an update by steps."""

import pytest

from core.fleet.operations import FleetFailed
from tests.unit.core.engines import UPDATE, administered, broken, restart, serve_http

ALL = ["start", "update", "finish"]


async def test_a_step_names_who_was_lost_since_the_start_and_the_others_can_finish():
    async with administered() as fleet:
        await fleet.pause()
        await fleet.start()
        fleet.rig.move(fleet.workers[1], "gone")
        with pytest.raises(FleetFailed) as failed:
            await fleet.receive()
        gone = "w1: it is gone, and was there when the update was started"
        assert failed.value.message == f"update_weights failed on {gone}. Quarantined; the other workers go on"
        assert (failed.value.status, fleet.engines[0].asked.count("update")) == (409, 1)
        await fleet.receive()  # it has been told
        await fleet.finish("8")
        await fleet.resume()
        fleet.rig.move(fleet.workers[1], "ready")
        assert (fleet.states, fleet.engines[0].version) == (["ready", "quarantined"], "8")


async def test_a_finish_names_who_was_lost_since_the_start():
    async with administered() as fleet:
        await fleet.start()
        await fleet.receive()
        fleet.rig.move(fleet.workers[1], "gone")
        with pytest.raises(FleetFailed, match="finish_weight_update failed on w1: it is gone"):
            await fleet.finish("8")
        assert (fleet.states, fleet.engines[0].version) == (["ready", "gone"], "8")


async def test_a_step_names_who_was_replaced_since_the_start_once():
    async with administered() as fleet:
        await fleet.start()
        restart(fleet, fleet.workers[1])
        with pytest.raises(FleetFailed, match="update_weights failed on w1: it was replaced by another process since"):
            await fleet.receive()
        await fleet.finish("8")
        assert fleet.states == ["ready", "quarantined"]


async def test_steps_on_one_worker_alone_are_about_nobody_else():
    async with administered() as fleet:
        await fleet.start()
        fleet.rig.move(fleet.workers[1], "gone")
        await fleet.updating.receive(fleet.workers[:1], UPDATE, by="me", alone=True)
        await fleet.updating.finish(fleet.workers[:1], "8", by="me", alone=True)
        assert fleet.states == ["ready", "gone"]


async def test_who_failed_in_an_update_and_dies_then_is_named_no_more():
    async with administered() as fleet:
        await fleet.start()
        fleet.engines[1].fails["update"] = [broken("shapes differ")]
        with pytest.raises(FleetFailed):
            await fleet.receive()
        fleet.rig.move(fleet.workers[1], "gone")
        await fleet.receive()
        await fleet.finish("8")
        assert fleet.states == ["ready", "gone"]


async def test_who_comes_in_the_middle_of_an_update_has_missed_it():
    async with administered() as fleet:
        late = fleet.workers[1]
        fleet.rig.move(late, "gone")
        await fleet.start()
        fleet.rig.move(late, "ready")
        await fleet.receive()
        await fleet.finish("8")
        assert fleet.states == ["ready", "quarantined"]
        assert late.reason == "it came while the other workers were updated"
        await fleet.update("9")
        assert fleet.states == ["ready", "ready"]


async def test_who_comes_in_a_pause_is_paused_for_the_update_and_resumed_with_the_others():
    async with administered() as fleet:
        late = fleet.workers[1]
        fleet.rig.move(late, "gone")
        await fleet.pause()
        fleet.rig.move(late, "ready")
        await fleet.update("8")
        assert (fleet.states, [engine.paused for engine in fleet.engines]) == (["paused", "paused"], [True, True])
        await fleet.resume()
        assert (fleet.states, [engine.paused for engine in fleet.engines]) == (["ready", "ready"], [False, False])


async def test_a_worker_that_is_started_anew_in_an_update_is_quarantined_when_it_comes_back():
    async with administered() as fleet:
        await fleet.start()
        restart(fleet, fleet.workers[1])
        assert fleet.states == ["updating", "quarantined"]
        assert fleet.workers[1].reason == "it was started anew in the middle of a weight update"


async def test_a_list_is_for_the_ranks_of_the_start_though_a_worker_was_lost_since():
    async with administered(1, 1, 1) as fleet:
        sent = [serve_http(worker, {}) for worker in fleet.workers]
        await fleet.start()
        fleet.rig.move(fleet.workers[1], "gone")
        parts = [{**UPDATE, "part": part} for part in range(3)]
        with pytest.raises(FleetFailed, match="update_weights failed on w1: it is gone") as failed:
            await fleet.receive(parts)
        assert failed.value.status == 409
        await fleet.receive(parts)  # the trainer's next chunk
        await fleet.updating.receive(fleet.workers[2:], parts[2:], by="me", alone=True)
        part = [[body["update_info"] for body in bodies] for bodies in sent]
        assert part == [[parts[:1]] * 2, [], [parts[2:]] * 3]
