"""Weight updates, step by step: no engine is ever run on weights that aren't there, and everybody learns what has failed."""

from functools import partial

import httpx
import pytest
import trio
from msgspec.structs import replace
from trio.testing import wait_all_tasks_blocked

from core.errors import BadRequest, CallError
from core.fleet.operations import FleetFailed
from tests.unit.core.engines import INIT, UPDATE, administered, broken, refused, serve_http

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


async def test_a_quarantine_ends_by_hand_and_the_worker_goes_on_with_the_others():
    async with administered() as fleet:
        await fleet.pause()
        fleet.administration.quarantine(fleet.workers[0], "it smells", by="me")
        await fleet.resume()
        assert (fleet.states, fleet.engines[0].paused) == (["quarantined", "ready"], True)
        await fleet.administration.release(fleet.workers[0], by="me")
        assert (fleet.states, fleet.engines[0].paused) == (["ready", "ready"], False)


# --- groups ------------------------------------------------------------------------------------------------------------------


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


def restart(fleet, worker):
    assert worker.info
    fleet.rig.move(worker, "gone")
    worker.info = replace(worker.info, instance_id="2")
    fleet.rig.move(worker, "ready")


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


# --- over HTTP ---------------------------------------------------------------------------------------------------------------


async def test_a_list_is_shared_out_by_ranks():
    async with administered(1, 3) as fleet:
        sent = [serve_http(worker, {}) for worker in fleet.workers]
        await fleet.start()
        parts = [{**UPDATE, "part": part} for part in range(4)]
        with pytest.raises(BadRequest, match="update_info: 3 objects for 4 ranks"):
            await fleet.receive(parts[:3])
        await fleet.receive(parts)
        assert [body["update_info"] for [body] in sent] == [parts[:1], parts[1:]]


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


async def test_a_list_is_for_the_ranks_of_all_though_each_was_started_by_itself():
    async with administered(1, 1) as fleet:
        sent = [serve_http(worker, {}) for worker in fleet.workers]
        for worker in fleet.workers:
            await fleet.updating.start([worker], by="me")
        await fleet.receive([{**UPDATE, "part": part} for part in range(2)])
        assert [body["update_info"][0]["part"] for [body] in sent] == [0, 1]


async def test_results_come_in_the_order_of_the_ranks():
    async with administered(1, 2) as fleet:
        serve_http(fleet.workers[0], {"results": ["a"]})
        serve_http(fleet.workers[1], {"results": ["b", None]})
        assert await fleet.methods.call(fleet.workers, {"method": "m"}, by="me") == ["a", "b", None]
        assert fleet.states == ["ready", "ready"]


async def test_a_method_that_replaces_the_weights_is_an_update():
    async with administered() as fleet:
        serve_http(fleet.workers[0], {"results": [None]})
        serve_http(
            fleet.workers[1],
            lambda count: (
                httpx.Response(500, json={"error": "no such file"}) if count == 1 else httpx.Response(200, json={"results": [None]})
            ),
        )
        reload = partial(fleet.methods.call, fleet.workers, {"method": "reload_weights"}, by="me")
        await fleet.pause()
        with pytest.raises(FleetFailed, match="w1: no such file"):
            await reload()
        await fleet.resume()
        assert fleet.states == ["ready", "quarantined"]
        await reload()  # the trainer has let go of both
        assert fleet.states == ["ready", "ready"]


async def test_a_method_that_replaces_the_weights_is_refused_while_an_update_by_steps_is_open():
    async with administered(1) as fleet:
        bodies = serve_http(fleet.workers[0], {"results": [None]})
        await fleet.start()
        with pytest.raises(CallError, match="collective_rpc reload_weights: me has started a weight update on w0") as refused:
            await fleet.methods.call(fleet.workers, {"method": "reload_weights"}, by="somebody")
        assert (refused.value.status, bodies) == (409, [])
        assert await fleet.methods.call(fleet.workers, {"method": "get_rank"}, by="somebody") == [None]
        await fleet.receive()
        await fleet.finish("8")
        assert fleet.states == ["ready"]


async def test_a_worker_that_failed_in_an_update_which_paused_it_goes_on_when_a_checkpoint_has_mended_it():
    async with administered() as fleet:
        serve_http(fleet.workers[0], {"results": [None]})
        await fleet.start()
        fleet.engines[0].fails["update"] = [broken()]
        with pytest.raises(FleetFailed):
            await fleet.receive()
        await fleet.finish()
        assert fleet.states == ["quarantined", "ready"]
        fleet.engines[0].broken = False
        await fleet.methods.call(fleet.workers[:1], {"method": "reload_weights"}, by="me")
        assert (fleet.states, fleet.engines[0].paused) == (["ready", "ready"], False)


async def test_a_method_that_nobody_has_quarantines_nobody():
    async with administered() as fleet:
        for worker in fleet.workers:
            serve_http(worker, lambda _: httpx.Response(500, json={"error": "'Worker' object has no attribute 'update_weights_from_path'"}))
        with pytest.raises(FleetFailed) as failed:
            await fleet.methods.call(fleet.workers, {"method": "update_weights_from_path"}, by="me")
        assert failed.value.status == 404
        assert fleet.states == ["ready", "ready"]


# --- groups that are joined by a method of the workers ----------------------------------------------------------------------


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


async def test_a_label_follows_the_weights_of_each_worker():
    async with administered() as fleet:
        serve_http(fleet.workers[0], {"results": [None]})
        serve_http(fleet.workers[1], lambda _: httpx.Response(500, json={"error": "disk full"}))
        with pytest.raises(FleetFailed, match="w1: disk full"):
            await fleet.methods.call(fleet.workers, {"method": "reload_weights"}, by="me", version="7")
        assert [(engine.version, worker.policy_version) for engine, worker in zip(fleet.engines, fleet.workers, strict=True)] == [
            ("7", "7"),
            ("default", None),
        ]


async def wait_for_state(worker, state) -> None:
    while worker.state != state:
        await trio.lowlevel.checkpoint()
