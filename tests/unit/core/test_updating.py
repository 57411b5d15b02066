"""Weight updates, step by step: no engine is ever run on weights that aren't there, and everybody learns what has failed."""

from functools import partial

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from core.errors import BadRequest, CallError
from core.fleet.operations import FleetFailed
from tests.unit.core.engines import UPDATE, administered, broken, refused, serve_http

ALL = ["start", "update", "finish"]


async def test_an_update_between_pause_and_resume_is_only_what_the_trainer_asks_for():
    async with administered() as fleet:
        await fleet.pause()
        await fleet.update("8")
        assert fleet.states == ["paused", "paused"]
        await fleet.resume()
        assert [engine.asked for engine in fleet.engines] == [["pause", *ALL, "resume"]] * 2
        assert [(worker.state, worker.policy_version) for worker in fleet.workers] == [("ready", "8")] * 2


async def test_workers_that_are_not_paused_are_paused_for_the_time_of_the_update():
    async with administered() as fleet:
        await fleet.start()
        assert [(worker.state, worker.reason) for worker in fleet.workers] == [("updating", "a weight update is running")] * 2
        await fleet.receive()
        await fleet.finish()
        assert [engine.asked for engine in fleet.engines] == [["pause", *ALL, "resume"]] * 2
        assert fleet.states == ["ready", "ready"]


async def test_an_update_may_come_in_many_pieces():
    async with administered() as fleet:
        await fleet.start()
        for _ in range(3):
            await fleet.receive()
        await fleet.finish()
        assert fleet.engines[0].asked.count("update") == 3


async def test_nothing_is_resumed_in_the_middle_of_an_update():
    async with administered() as fleet:
        await fleet.pause()
        await fleet.start()
        for operation in (fleet.resume, partial(fleet.pausing.wake_up, fleet.workers, [], by="me")):
            with pytest.raises(CallError, match="a weight update is running on w0, w1: finish it first") as conflict:
                await operation()
            assert conflict.value.status == 409
        assert "resume" not in fleet.engines[0].asked


@pytest.mark.parametrize("mode", ["wait", "abort"])
async def test_in_the_middle_of_an_update_calls_are_neither_waited_for_nor_ended(mode):
    async with administered() as fleet:
        await fleet.start()
        sleep = partial(fleet.pausing.sleep, fleet.workers, 0, mode, by="me")
        for operation in (partial(fleet.pause, mode=mode), sleep):
            with pytest.raises(CallError, match="a weight update is running on w0, w1: finish it first") as conflict:
                await operation()
            assert conflict.value.status == 409
        assert [engine.asked for engine in fleet.engines] == [["pause", "start"]] * 2
        await fleet.receive()
        await fleet.finish()
        assert fleet.states == ["ready", "ready"]


async def test_a_pause_in_the_middle_of_an_update_outlasts_it():
    async with administered() as fleet:
        await fleet.start()
        await fleet.pause(mode="keep")
        await fleet.receive()
        await fleet.finish()
        assert (fleet.states, [engine.paused for engine in fleet.engines]) == (["paused", "paused"], [True, True])
        await fleet.resume()
        assert fleet.states == ["ready", "ready"]


async def test_calls_on_a_worker_whose_weights_are_not_whole_are_waited_for_by_nobody():
    async with administered() as fleet:
        await fleet.start()
        fleet.engines[0].fails["update"] = [broken()]
        with pytest.raises(FleetFailed):
            await fleet.receive()
        await fleet.finish()
        await fleet.pausing.sleep(fleet.workers, 1, "wait", by="me")
        assert [engine.dead for engine in fleet.engines] == [False, False]
        assert [engine.asleep for engine in fleet.engines] == [True, True]


async def test_steps_without_a_start_are_refused_before_a_worker_hears_of_them():
    async with administered() as fleet:
        for step in (fleet.receive, fleet.finish):
            with pytest.raises(CallError, match="no weight update is running: start one first") as conflict:
                await step()
            assert conflict.value.status == 409
        assert fleet.engines[0].asked == []


async def test_who_fails_in_an_update_is_quarantined_and_the_others_go_on():
    async with administered() as fleet:
        await fleet.pause()
        await fleet.start()
        fleet.engines[0].fails["update"] = [broken("shapes differ")]
        with pytest.raises(FleetFailed) as failed:
            await fleet.receive()
        assert failed.value.message == "update_weights failed on w0: shapes differ. Quarantined; the other workers go on"
        await fleet.receive()
        await fleet.finish("8")
        await fleet.resume()
        assert [worker.state for worker in fleet.workers] == ["quarantined", "ready"]
        assert fleet.workers[0].reason == "update_weights: shapes differ"
        assert fleet.engines[0].paused
        assert fleet.engines[0].asked == ["pause", "start", "update"]
        assert fleet.engines[1].version == "8"


async def test_a_fault_of_ours_with_one_worker_breaks_nothing_off_on_the_others():
    async with administered() as fleet:
        await fleet.start()
        fleet.engines[0].fails["update"] = [LookupError("mine")]
        with pytest.raises(FleetFailed, match="update_weights failed on w0: a fault of headrace: LookupError"):
            await fleet.receive()
        await fleet.finish()
        assert fleet.states == ["quarantined", "ready"]


async def test_a_complete_update_ends_a_quarantine():
    async with administered() as fleet:
        await fleet.start()
        fleet.engines[0].fails["update"] = [broken()]
        with pytest.raises(FleetFailed):
            await fleet.receive()
        await fleet.finish("8")
        assert fleet.states == ["quarantined", "ready"]
        await fleet.update("9")
        assert fleet.states == ["ready", "ready"]
        assert [engine.version for engine in fleet.engines] == ["9", "9"]


async def test_an_update_of_the_draft_model_mends_no_other_weights():
    async with administered() as fleet:
        await fleet.start()
        fleet.engines[0].fails["update"] = [broken("shapes differ")]
        with pytest.raises(FleetFailed):
            await fleet.receive()
        await fleet.finish("8")
        await fleet.updating.start(fleet.workers, by="me", draft=True)
        await fleet.receive()
        await fleet.finish(None)
        assert fleet.states == ["quarantined", "ready"]
        assert (fleet.workers[0].reason, "resume" in fleet.engines[0].asked) == ("update_weights: shapes differ", False)
        await fleet.update("9")
        assert fleet.states == ["ready", "ready"]


async def test_a_draft_model_that_was_not_replaced_completely_is_mended_by_nothing_else():
    async with administered() as fleet:
        await fleet.updating.start(fleet.workers, by="me", draft=True)
        fleet.engines[0].fails["update"] = [broken("shapes differ")]
        with pytest.raises(FleetFailed):
            await fleet.receive()
        await fleet.finish(None)
        await fleet.update("9")
        assert fleet.states == ["quarantined", "ready"]
        await fleet.updating.start(fleet.workers, by="me", draft=True)
        await fleet.receive()
        await fleet.finish(None)
        assert fleet.states == ["ready", "ready"]


async def test_a_draft_update_that_nobody_has_begun_changes_nothing():
    async with administered() as fleet:
        serve_http(fleet.workers[0], {"results": [None]})
        await fleet.start()
        fleet.engines[0].fails["update"] = [broken()]
        with pytest.raises(FleetFailed):
            await fleet.receive()
        await fleet.finish()
        fleet.engines[0].broken = False
        for engine in fleet.engines:
            engine.fails["start"] = [refused("no draft model")]
        with pytest.raises(FleetFailed, match="Nothing has changed"):
            await fleet.updating.start(fleet.workers, by="me", draft=True)
        await fleet.methods.call(fleet.workers[:1], {"method": "reload_weights"}, by="me")
        assert fleet.states == ["ready", "ready"]


async def test_who_fails_at_the_start_is_quarantined_and_the_others_go_on():
    async with administered() as fleet:
        fleet.engines[1].fails["start"] = [broken()]
        with pytest.raises(FleetFailed, match="start_weight_update failed on w1: worker died"):
            await fleet.start()
        await fleet.receive()
        await fleet.finish()
        assert fleet.states == ["ready", "quarantined"]
        assert "update" not in fleet.engines[1].asked


async def test_who_fails_at_the_end_is_quarantined_and_the_others_go_on():
    async with administered() as fleet:
        await fleet.start()
        await fleet.receive()
        fleet.engines[1].fails["finish"] = [broken()]
        with pytest.raises(FleetFailed, match="finish_weight_update failed on w1: worker died"):
            await fleet.finish()
        assert fleet.states == ["ready", "quarantined"]
        assert "resume" not in fleet.engines[1].asked


async def test_a_start_that_everybody_refuses_has_changed_nothing():
    async with administered() as fleet:
        for engine in fleet.engines:
            engine.fails["start"] = [refused()]
        with pytest.raises(
            FleetFailed, match=r"start_weight_update failed on w0: no backend; w1: no backend\. Nothing has changed"
        ) as failed:
            await fleet.start()
        assert failed.value.status == 400
        assert fleet.states == ["ready", "ready"]
        assert [engine.paused for engine in fleet.engines] == [False, False]


async def test_a_start_on_a_fleet_that_can_not_be_paused_has_changed_nothing():
    async with administered() as fleet:
        fleet.engines[0].fails["pause"] = [broken()]
        with pytest.raises(FleetFailed, match="start_weight_update failed on w0"):
            await fleet.start()
        assert fleet.states == ["ready", "ready"]
        assert "start" not in fleet.engines[1].asked


async def test_pieces_that_everybody_refuses_end_no_update():
    async with administered() as fleet:
        await fleet.start()
        for engine in fleet.engines:
            engine.fails["update"] = [refused("no JSON")]
        with pytest.raises(FleetFailed, match="Nothing has changed"):
            await fleet.receive()
        assert fleet.states == ["updating", "updating"]
        await fleet.receive()
        await fleet.finish()


async def test_a_start_that_failed_on_one_may_be_repeated():
    async with administered() as fleet:
        fleet.engines[1].fails["start"] = [broken()]
        with pytest.raises(FleetFailed):
            await fleet.start()
        await fleet.start()
        await fleet.receive()
        await fleet.finish()
        assert fleet.states == ["ready", "ready"]
        assert fleet.engines[0].asked.count("start") == 1


async def test_the_same_piece_that_is_posted_again_while_it_is_received_joins_it():
    async with administered() as fleet, trio.open_nursery() as nursery:
        await fleet.start()
        fleet.engines[0].stalls["update"] = trio.Event()
        with trio.move_on_after(0):  # its client has lost patience
            await fleet.receive()
        nursery.start_soon(fleet.receive)
        await wait_all_tasks_blocked()
        fleet.engines[0].stalls["update"].set()
        await wait_all_tasks_blocked()
        await fleet.finish()
    assert [engine.asked.count("update") for engine in fleet.engines] == [1, 1]


async def test_a_worker_whose_label_is_another_one_afterwards_is_quarantined():
    async with administered() as fleet:
        await fleet.start()
        await fleet.receive()

        async def finish(request):
            fleet.engines[0].updating = fleet.engines[0].broken = False

        fleet.engines[0].finish_weight_update = finish
        with pytest.raises(FleetFailed, match="w0: it labels its weights 'default' afterwards"):
            await fleet.finish("8")
        assert fleet.states == ["quarantined", "ready"]


async def test_a_trainer_that_dies_in_an_update_leaves_a_quarantine_and_the_next_one_can_update(autojump_clock):
    async with administered(lease=100.0) as fleet:
        await fleet.start()
        await fleet.receive()
        await trio.sleep(101)
        assert fleet.states == ["quarantined", "quarantined"]
        assert "its trainer was silent for 100 s in the middle of a weight update" in fleet.workers[0].reason
        await fleet.update("9")
        assert fleet.states == ["ready", "ready"]


async def test_a_quarantine_ends_by_hand_and_the_worker_goes_on_with_the_others():
    async with administered() as fleet:
        await fleet.pause()
        fleet.administration.quarantine(fleet.workers[0], "it smells", by="me")
        await fleet.resume()
        assert (fleet.states, fleet.engines[0].paused) == (["quarantined", "ready"], True)
        await fleet.administration.release(fleet.workers[0], by="me")
        assert (fleet.states, fleet.engines[0].paused) == (["ready", "ready"], False)


async def test_a_list_is_shared_out_by_ranks():
    async with administered(1, 3) as fleet:
        sent = [serve_http(worker, {}) for worker in fleet.workers]
        await fleet.start()
        parts = [{**UPDATE, "part": part} for part in range(4)]
        with pytest.raises(BadRequest, match="update_info: 3 objects for 4 ranks"):
            await fleet.receive(parts[:3])
        await fleet.receive(parts)
        assert [body["update_info"] for [body] in sent] == [parts[:1], parts[1:]]


async def test_a_list_is_for_the_ranks_of_all_though_each_was_started_by_itself():
    async with administered(1, 1) as fleet:
        sent = [serve_http(worker, {}) for worker in fleet.workers]
        for worker in fleet.workers:
            await fleet.updating.start([worker], by="me")
        await fleet.receive([{**UPDATE, "part": part} for part in range(2)])
        assert [body["update_info"][0]["part"] for [body] in sent] == [0, 1]
