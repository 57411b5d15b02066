"""Pausing and resuming the fleet: all of it or none, whoever leaves; on the virtual clock."""

import pytest
import trio
from msgspec.structs import replace
from trio.testing import wait_all_tasks_blocked

from core.errors import BadRequest, CallError, NotFound, NoWorker
from core.fleet import administration as administration_module
from core.fleet import arrivals as arrivals_module
from core.fleet import operations as operations_module
from core.fleet import pausing as pausing_module
from core.fleet.operations import FleetFailed
from core.fleet.standing import Standing
from core.wire.generated import vllm
from tests.unit.core.engines import administered, broken, serve_http
from tests.unit.core.rig import Browser


async def test_calls_that_arrive_while_the_fleet_is_paused_wait_and_are_answered():
    async with administered() as fleet, trio.open_nursery() as nursery:
        await fleet.pause(mode="wait", clear_cache=True)
        assert [engine.sent["pause"] for engine in fleet.engines] == [(vllm.PauseMode.WAIT, True)] * 2
        assert [(worker.state, worker.reason) for worker in fleet.workers] == [("paused", "by a trainer")] * 2
        browser = Browser()
        nursery.start_soon(browser.ask, fleet.rig)
        await wait_all_tasks_blocked()
        assert fleet.rig.fleet.gate.waiting == 1
        await fleet.resume()
        await wait_all_tasks_blocked()
        assert browser.status == 200
        assert fleet.states == ["ready", "ready"]


async def test_the_gate_is_closed_before_the_first_worker_is_asked_and_all_are_asked_at_once():
    async with administered() as fleet, trio.open_nursery() as nursery:
        for engine in fleet.engines:
            engine.stalls["pause"] = trio.Event()
        nursery.start_soon(fleet.pause)
        await wait_all_tasks_blocked()
        assert fleet.states == ["paused", "paused"]
        assert [engine.asked for engine in fleet.engines] == [["pause"], ["pause"]]
        for engine in fleet.engines:
            engine.stalls["pause"].set()


async def test_when_one_refuses_to_pause_the_others_go_on_and_the_error_names_it():
    async with administered() as fleet:
        fleet.engines[1].fails["pause"] = [broken("it doesn't want to")]
        with pytest.raises(FleetFailed) as failed:
            await fleet.pause()
        assert failed.value.message == "pause failed on w1: it doesn't want to. No worker stays paused by this"
        assert failed.value.status == 500
        assert fleet.states == ["ready", "ready"]
        assert [engine.paused for engine in fleet.engines] == [False, False]
        assert fleet.journal[-1] == ("pause", failed.value.message)


async def test_when_one_refuses_to_be_paused_again_those_that_were_paused_before_stay_so():
    async with administered() as fleet:
        await fleet.pausing.pause(fleet.administration.worker("w0"), "keep", clear_cache=False, by="me")
        fleet.engines[1].fails["pause"] = [broken()]
        with pytest.raises(FleetFailed):
            await fleet.pause()
        assert fleet.states == ["paused", "ready"]
        assert fleet.engines[0].paused


async def test_an_engine_is_frozen_only_after_its_worker_has_heard_of_the_calls_that_were_given_up():
    async with administered(1) as fleet, trio.open_nursery() as nursery:
        heard = trio.Event()
        fleet.workers[0].settle = heard.wait
        nursery.start_soon(fleet.pause)
        await wait_all_tasks_blocked()
        assert (fleet.states, fleet.engines[0].asked) == (["paused"], [])
        heard.set()
        await wait_all_tasks_blocked()
        assert fleet.engines[0].asked == ["pause"]


async def test_a_worker_that_lets_the_deadline_pass_has_failed(autojump_clock):
    async with administered(deadline=5.0) as fleet:
        fleet.engines[0].stalls["pause"] = trio.Event()
        with pytest.raises(FleetFailed, match="w0: no answer within 5 s") as failed:
            await fleet.pause()
        assert failed.value.status == 504
        assert fleet.states == ["ready", "ready"]
        assert trio.current_time() >= 5


async def test_a_pause_that_waits_for_calls_has_no_deadline(autojump_clock):
    async with administered(deadline=5.0) as fleet, trio.open_nursery() as nursery:
        fleet.engines[0].stalls["pause"] = trio.Event()
        nursery.start_soon(lambda: fleet.pause(mode="wait"))
        await trio.sleep(1000)
        fleet.engines[0].stalls["pause"].set()
    assert fleet.engines[1].paused


async def test_a_resume_ends_a_pause_that_still_waits_for_calls():
    async with administered() as fleet, trio.open_nursery() as nursery:
        fleet.engines[0].stalls["pause"] = trio.Event()
        ended = []

        async def pause() -> None:
            with pytest.raises(CallError) as error:
                await fleet.pause(mode="wait")
            ended.append((error.value.status, error.value.message))

        nursery.start_soon(pause)
        await wait_all_tasks_blocked()
        await fleet.resume()
        await wait_all_tasks_blocked()
        assert ended == [(409, "pause: ended before all calls had: me has asked for a resume")]
        assert (fleet.states, [engine.paused for engine in fleet.engines]) == (["ready", "ready"], [False, False])


async def test_a_resume_waits_for_a_pause_that_does_not_wait_for_calls():
    async with administered() as fleet, trio.open_nursery() as nursery:
        fleet.engines[0].stalls["pause"] = trio.Event()
        nursery.start_soon(fleet.pause)
        await wait_all_tasks_blocked()
        nursery.start_soon(fleet.resume)
        await wait_all_tasks_blocked()
        assert [engine.asked for engine in fleet.engines] == [["pause"], ["pause"]]
        fleet.engines[0].stalls["pause"].set()


async def test_who_asks_for_the_same_joins_the_one_that_runs():
    async with administered() as fleet, trio.open_nursery() as nursery:
        fleet.engines[0].stalls["pause"] = trio.Event()
        for _ in range(3):
            nursery.start_soon(fleet.pause)
        await wait_all_tasks_blocked()
        fleet.engines[0].stalls["pause"].set()
    assert fleet.engines[1].asked == ["pause"]


async def test_who_asks_for_the_same_after_something_else_comes_after_that():
    async with administered(1) as fleet, trio.open_nursery() as nursery:
        fleet.engines[0].stalls["pause"] = trio.Event()
        for operation in (fleet.pause, fleet.resume, fleet.pause):
            nursery.start_soon(operation)
            await wait_all_tasks_blocked()
        fleet.engines[0].stalls["pause"].set()
        await wait_all_tasks_blocked()
        assert fleet.engines[0].asked == ["pause", "resume", "pause"]
        assert fleet.states == ["paused"]


async def test_operations_on_a_worker_take_turns_and_those_on_others_do_not():
    async with administered(1, 1, models=["a", "b"]) as fleet, trio.open_nursery() as nursery:
        fleet.engines[0].stalls["pause"] = trio.Event()
        a, b = fleet.administration.workers("a"), fleet.administration.workers("b")
        nursery.start_soon(lambda: fleet.pausing.pause(a, "keep", clear_cache=False, by="me"))
        await wait_all_tasks_blocked()
        nursery.start_soon(lambda: fleet.pausing.resume(a, by="me"))
        await fleet.pausing.pause(b, "keep", clear_cache=False, by="me")
        await wait_all_tasks_blocked()
        assert fleet.engines[0].asked == ["pause"]
        assert [entry["missing"] for entry in fleet.administration.describe()] == [["w0"], None]
        fleet.engines[0].stalls["pause"].set()
    assert fleet.engines[0].asked == ["pause", "resume"]
    assert fleet.states == ["ready", "paused"]


async def test_a_pause_is_finished_and_recorded_when_its_client_has_gone():
    async with administered() as fleet:
        fleet.engines[0].stalls["pause"] = trio.Event()
        with trio.CancelScope() as client:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(fleet.pause)
                await wait_all_tasks_blocked()
                client.cancel()
        assert fleet.states == ["paused", "paused"]
        fleet.engines[0].stalls["pause"].set()
        await wait_all_tasks_blocked()
        assert [engine.paused for engine in fleet.engines] == [True, True]
        assert fleet.journal == [("pause", "ok")]
        assert fleet.administration.journal.entries[0].by == "me"


async def test_whoever_waits_for_an_operation_when_headrace_ends_is_told():
    refusals = []

    async def pause(fleet):
        try:
            await fleet.pause()
        except NoWorker as error:
            refusals.append(error.message)

    async with trio.open_nursery() as nursery, administered() as fleet:
        fleet.engines[0].stalls["pause"] = trio.Event()
        nursery.start_soon(pause, fleet)
        await wait_all_tasks_blocked()
    assert refusals == ["pause: headrace ends; nobody knows how far the workers came"]


async def test_an_operation_that_lasts_is_reported_with_who_is_missing(monkeypatch, autojump_clock):
    lines = []
    monkeypatch.setattr(operations_module.log, "warning", lambda event, **fields: lines.append((event, fields)))
    async with administered(stuck_after=60.0) as fleet, trio.open_nursery() as nursery:
        fleet.engines[1].stalls["pause"] = trio.Event()
        nursery.start_soon(lambda: fleet.pause(mode="wait"))
        await trio.sleep(121)
        [entry] = fleet.administration.describe()
        fleet.engines[1].stalls["pause"].set()
    assert entry == {"operation": "pause", "workers": ["w0", "w1"], "by": "me", "seconds": 121.0, "missing": ["w1"]}
    assert lines == [("fleet.stuck", {"operation": "pause", "seconds": seconds, "missing": ["w1"]}) for seconds in (60.0, 120.0)]


async def test_a_worker_that_does_not_resume_stays_paused_and_the_others_go_on():
    async with administered() as fleet:
        await fleet.pause()
        fleet.engines[0].fails["resume"] = [broken()]
        with pytest.raises(FleetFailed, match=r"resume failed on w0: worker died\. The other workers were resumed"):
            await fleet.resume()
        assert fleet.states == ["paused", "ready"]
        await fleet.resume()
        assert fleet.states == ["ready", "ready"]


async def test_a_fleet_sleeps_and_wakes_up_by_and_by():
    async with administered() as fleet:
        await fleet.pausing.sleep(fleet.workers, 1, "abort", by="me")
        assert [(worker.state, worker.reason) for worker in fleet.workers] == [("paused", "it sleeps")] * 2
        assert not (await fleet.pausing.wake_up(fleet.workers, ["weights"], by="me")).awake
        assert fleet.states == ["paused", "paused"]
        assert (await fleet.pausing.wake_up(fleet.workers, ["kv_cache"], by="me")).awake
        assert fleet.states == ["ready", "ready"]


async def test_who_was_taken_out_by_hand_wakes_up_with_the_others_and_takes_no_calls():
    async with administered() as fleet:
        for worker in fleet.workers:
            fleet.administration.quarantine(worker, "it smells", by="me")
        await fleet.pausing.sleep(fleet.workers, 1, "abort", by="me")
        assert (await fleet.pausing.wake_up(fleet.workers, [], by="me")).awake
        assert [engine.asleep for engine in fleet.engines] == [False, False]
        assert fleet.states == ["quarantined", "quarantined"]


async def test_workers_whose_weights_are_not_whole_are_not_said_to_be_awake():
    async with administered() as fleet:
        await fleet.start()
        for engine in fleet.engines:
            engine.fails["update"] = [broken("no space")]
        with pytest.raises(FleetFailed):
            await fleet.receive()
        await fleet.pausing.sleep(fleet.workers, 1, "abort", by="me")
        with pytest.raises(CallError, match=r"no worker's weights are whole: .* w0: update_weights: no space; w1: ") as refused:
            await fleet.pausing.wake_up(fleet.workers, [], by="me")
        assert refused.value.status == 409
        assert not (await fleet.pausing.wake_up(fleet.workers, ["weights"], by="me")).awake
        assert [engine.sent["wake_up"] for engine in fleet.engines] == [["weights"], ["weights"]]


async def test_who_sleeps_on_because_its_weights_are_not_whole_is_named(monkeypatch):
    lines = []
    monkeypatch.setattr(pausing_module.log, "warning", lambda event, **fields: lines.append((event, fields)))
    async with administered() as fleet:
        await fleet.start()
        fleet.engines[0].fails["update"] = [broken("no space")]
        with pytest.raises(FleetFailed):
            await fleet.receive()
        await fleet.finish("8")
        await fleet.pausing.sleep(fleet.workers, 1, "abort", by="me")
        asleep = {"w0": "update_weights: no space"}
        assert await fleet.pausing.wake_up(fleet.workers, [], by="me") == (True, asleep)
        assert [engine.asleep for engine in fleet.engines] == [True, False]
        assert lines == [("fleet.sleeps_on", {"workers": asleep})]
        assert await fleet.pausing.wake_up(fleet.workers, ["weights"], by="me") == (False, {})


async def test_waking_up_the_weights_resumes_nobody_whose_weights_are_not_whole():
    async with administered() as fleet:
        await fleet.start()
        fleet.engines[0].fails["update"] = [broken("no space")]
        with pytest.raises(FleetFailed):
            await fleet.receive()
        assert "no worker's weights are whole" in str(await refusal(fleet.pausing.wake_up(fleet.workers, ["weights"], by="me")))
        await fleet.finish("8")
        await fleet.pausing.wake_up(fleet.workers, ["weights"], by="me")
        assert ["wake_up" in engine.asked for engine in fleet.engines] == [False, True]


async def refusal(refused) -> CallError:
    with pytest.raises(CallError) as error:
        await refused
    return error.value


async def test_a_fleet_that_sleeps_is_not_resumed():
    async with administered() as fleet:
        await fleet.pausing.sleep(fleet.workers[:1], 1, "abort", by="me")
        with pytest.raises(CallError, match=r"resume: w0 sleep: wake them up first \(/wake_up\)") as refused:
            await fleet.resume()
        assert refused.value.status == 409
        assert [engine.asked for engine in fleet.engines] == [["sleep"], []]
        await fleet.pausing.wake_up(fleet.workers[:1], [], by="me")
        await fleet.resume()
        assert fleet.states == ["ready", "ready"]


async def test_a_pause_that_fails_wakes_nobody_up():
    async with administered() as fleet:
        await fleet.pausing.sleep(fleet.workers, 1, "keep", by="me")
        fleet.engines[1].fails["pause"] = [broken("it doesn't want to")]
        with pytest.raises(FleetFailed, match="pause failed on w1"):
            await fleet.pause(mode="wait")
        assert [engine.asked for engine in fleet.engines] == [["sleep", "pause"]] * 2
        assert fleet.engines[0].sent["pause"] == (vllm.PauseMode.KEEP, False), "its calls can't go on without weights"
        assert await fleet.pausing.wake_up(fleet.workers, [], by="me")
        assert fleet.states == ["ready", "ready"]


async def test_who_cannot_sleep_takes_calls_and_is_named():
    async with administered() as fleet:
        fleet.engines[0].fails["sleep"] = [broken("no memory saver")]
        with pytest.raises(FleetFailed, match=r"sleep failed on w0: no memory saver\. The other workers sleep"):
            await fleet.pausing.sleep(fleet.workers, 2, "abort", by="me")
        assert fleet.states == ["ready", "paused"]


async def test_weights_that_a_sleep_has_discarded_take_no_calls_before_an_update():
    async with administered() as fleet:
        await fleet.pausing.sleep(fleet.workers, 2, "abort", by="me")
        assert fleet.states == ["paused", "paused"]
        assert await fleet.pausing.wake_up(fleet.workers, [], by="me") == (True, {})
        reason = "its weights were discarded by a sleep of level 2: update the fleet"
        assert [(worker.state, worker.reason) for worker in fleet.workers] == [("quarantined", reason)] * 2
        assert reason in str(await refusal(fleet.resume()))
        await fleet.start()
        await fleet.receive()
        await fleet.finish("8")
        assert fleet.states == ["ready", "ready"]


@pytest.mark.parametrize("by_method", [False, True])
async def test_an_update_between_the_weights_and_the_rest_ends_a_sleep_that_has_discarded_them(by_method):
    async with administered() as fleet:
        for worker in fleet.workers:
            serve_http(worker, {"results": [None]})
        await fleet.pausing.sleep(fleet.workers, 2, "keep", by="me")
        assert not (await fleet.pausing.wake_up(fleet.workers, ["weights"], by="me")).awake
        if by_method:
            await fleet.methods.call(fleet.workers, {"method": "reload_weights"}, by="me")
        else:
            await fleet.start()
            await fleet.receive()
            await fleet.finish("8")
        assert [(worker.state, worker.reason) for worker in fleet.workers] == [("paused", "it sleeps")] * 2
        assert await fleet.pausing.wake_up(fleet.workers, ["kv_cache"], by="me") == (True, {})
        assert fleet.states == ["ready", "ready"]


async def test_frozen_calls_do_not_go_on_without_weights():
    async with administered() as fleet:
        with fleet.workers[0].serving():
            await fleet.pausing.sleep(fleet.workers, 2, "keep", by="me")
            woken = await fleet.pausing.wake_up(fleet.workers, [], by="me")
        assert woken.asleep == {"w0": "its weights were discarded by a sleep of level 2: update the fleet"}
        assert fleet.states == ["paused", "quarantined"]


async def test_who_is_woken_up_behind_headraces_back_without_weights_takes_no_calls():
    async with administered() as fleet:
        await fleet.pausing.sleep(fleet.workers, 2, "abort", by="me")
        for state in ("paused", "ready"):
            fleet.rig.move(fleet.workers[0], state)
        assert fleet.states == ["quarantined", "paused"]


async def test_a_headrace_that_is_started_again_knows_whose_weights_a_sleep_has_discarded():
    before, after = Standing("1"), Standing("1")
    before.asleep = before.discarded = True
    before.spoiled.add("model")
    after.recall(before.note())
    assert (after.asleep, after.discarded, after.spoiled, after.failed) == (True, True, {"model"}, "")


# --- leases ------------------------------------------------------------------------------------------------------------------


async def test_a_pause_whose_trainer_is_silent_ends_loudly(monkeypatch, autojump_clock):
    lines = []
    monkeypatch.setattr(administration_module.log, "error", lambda event, **fields: lines.append((event, fields)))
    async with administered(lease=100.0) as fleet:
        await fleet.pause()
        await trio.sleep(99)
        assert fleet.states == ["paused", "paused"]
        await trio.sleep(2)
        assert fleet.states == ["ready", "ready"]
        assert lines == [("fleet.lease_ended", {"workers": ["w0", "w1"], "seconds": 100.0})]
        assert fleet.journal == [("pause", "ok"), ("lease_ended", "ok")]


async def test_a_pause_that_waits_for_calls_ends_with_the_lease_once_its_client_has_gone(autojump_clock):
    async with administered(lease=100.0) as fleet:
        fleet.engines[0].stalls["pause"] = trio.Event()
        with trio.move_on_after(500):
            await fleet.pause(mode="wait")
        await trio.sleep(99)
        assert fleet.states == ["paused", "paused"]
        await trio.sleep(2)
        assert (fleet.states, fleet.engines[1].paused) == (["ready", "ready"], False)
        assert fleet.journal == [
            ("pause", "pause: ended before all calls had: its trainer was silent for 100 s"),
            ("lease_ended", "ok"),
        ]


async def test_who_asks_again_for_a_pause_that_waits_is_waited_with(autojump_clock):
    async with administered(lease=100.0) as fleet, trio.open_nursery() as nursery:
        fleet.engines[0].stalls["pause"] = trio.Event()
        with trio.move_on_after(50):
            await fleet.pause(mode="wait")
        nursery.start_soon(lambda: fleet.pause(mode="wait"))
        await trio.sleep(500)
        fleet.engines[0].stalls["pause"].set()
        await wait_all_tasks_blocked()
        assert (fleet.states, fleet.engines[0].asked) == (["paused", "paused"], ["pause"])


async def test_a_trainer_that_asks_for_something_is_not_silent(autojump_clock):
    async with administered(lease=100.0) as fleet:
        await fleet.pause()
        for _ in range(5):
            await trio.sleep(90)
            fleet.administration.workers()
        assert fleet.states == ["paused", "paused"]


async def test_an_operation_that_runs_is_nobodys_silence(autojump_clock):
    async with administered(lease=100.0) as fleet, trio.open_nursery() as nursery:
        await fleet.pause()
        await fleet.start()
        fleet.engines[0].stalls["update"] = trio.Event()
        nursery.start_soon(fleet.receive)
        await trio.sleep(500)
        assert fleet.states == ["updating", "updating"]
        fleet.engines[0].stalls["update"].set()
        await wait_all_tasks_blocked()
        await fleet.finish()


def find(fleet, *states, sleep: bool = False) -> None:
    """What a headrace finds that has just begun."""
    for worker, engine, state in zip(fleet.workers, fleet.engines, states, strict=True):
        worker.info = replace(worker.info, supports_sleep=sleep)
        engine.paused = state == "paused"
        fleet.rig.move(worker, "gone")
        fleet.rig.move(worker, state)


async def pass_time(clock, seconds: float) -> None:
    """Without jumps in between, which a journal's thread would take for a file that is too slow."""
    await wait_all_tasks_blocked()
    clock.jump(seconds)
    await wait_all_tasks_blocked()


async def test_workers_that_are_found_paused_at_the_start_go_on_when_nobody_cares_for_them(monkeypatch, mock_clock, tmp_path):
    lines = []
    monkeypatch.setattr(administration_module.log, "error", lambda event, **fields: lines.append((event, fields)))
    path = str(tmp_path / "journal.sqlite")
    async with administered(journal=path) as fleet:
        await fleet.pause()
    async with administered(lease=100.0, journal=path) as fleet:
        find(fleet, "paused", "ready", sleep=True)
        await pass_time(mock_clock, 99)
        assert fleet.states == ["paused", "ready"]
        await pass_time(mock_clock, 2)
        assert (fleet.states, fleet.engines[0].paused) == (["ready", "ready"], False)
        assert lines == [("fleet.lease_ended", {"workers": ["w0"], "seconds": 100.0})]
        fleet.rig.move(fleet.workers[0], "paused")  # by somebody who goes past headrace
        await pass_time(mock_clock, 200)
        assert fleet.states == ["paused", "ready"]


def find_half_updated(fleet) -> None:
    """They were left between the start and the end of an update."""
    find(fleet, *["paused"] * len(fleet.workers))
    for engine in fleet.engines:
        engine.updating = engine.broken = True


async def test_without_a_journal_nobody_knows_the_weights_of_workers_that_are_found_paused_so_they_are_not_resumed(autojump_clock):
    async with administered(lease=100.0) as fleet:
        find_half_updated(fleet)
        await trio.sleep(101)
        assert [worker.state for worker in fleet.workers] == ["quarantined"] * 2
        assert fleet.workers[1].reason == (
            "it was paused when headrace came, and nobody knows whether its weights are whole: "
            "update the fleet, or take it as it is (POST /fleet/workers/w1/release)"
        )
        fleet.engines[1].updating = fleet.engines[1].broken = False
        await fleet.administration.release(fleet.workers[1], by="me")
        assert (fleet.states, fleet.engines[1].paused) == (["quarantined", "ready"], False)
        await fleet.update("9")
        assert (fleet.states, [engine.version for engine in fleet.engines]) == (["ready", "ready"], ["9", "9"])


async def test_a_journal_that_is_new_knows_no_more_than_none(mock_clock, tmp_path):
    async with administered(lease=100.0, journal=str(tmp_path / "journal.sqlite")) as fleet:
        find_half_updated(fleet)
        await pass_time(mock_clock, 101)
        assert fleet.states == ["quarantined", "quarantined"]


@pytest.mark.parametrize("sleep", [False, True])
async def test_a_pause_of_workers_that_nobody_knows_waits_for_no_call_and_its_lease_resumes_nobody(autojump_clock, sleep):
    async with administered(lease=100.0) as fleet:
        find_half_updated(fleet)
        for worker in fleet.workers:
            assert worker.info
            worker.info = replace(worker.info, supports_sleep=sleep)
        await fleet.pause(mode="wait")
        await trio.sleep(101)
        assert (fleet.states, [engine.dead for engine in fleet.engines]) == (["quarantined"] * 2, [False, False])


async def test_a_trainer_that_comes_back_after_a_restart_of_headrace_can_update_whom_nobody_knows(autojump_clock):
    async with administered(lease=100.0) as fleet:
        find_half_updated(fleet)
        await fleet.pause()
        await fleet.update("9")
        assert fleet.states == ["paused", "paused"]
        await trio.sleep(101)
        assert fleet.states == ["ready", "ready"]


async def test_a_trainer_resumes_whom_it_has_paused_though_headrace_was_started_anew_meanwhile():
    async with administered(lease=100.0) as fleet:
        find(fleet, "paused", "paused")
        await fleet.resume()
        assert fleet.states == ["ready", "ready"]


def forget_the_names(fleet) -> None:
    """Workers without gRPC don't tell which process they are."""
    for number, worker in enumerate(fleet.workers):
        worker.info = replace(worker.info, instance_id="")
        worker.introduced_at = float(number)


@pytest.mark.parametrize("left", ["half updated", "whole"])
async def test_a_process_without_a_name_that_is_found_paused_is_the_one_that_the_journal_knows(mock_clock, tmp_path, left):
    path = str(tmp_path / "journal.sqlite")
    async with administered(journal=path) as fleet:
        forget_the_names(fleet)
        await fleet.update("8")
        await fleet.pause()
        if left == "half updated":
            await fleet.start()
    async with administered(lease=100.0, journal=path) as fleet:
        forget_the_names(fleet)
        for worker in fleet.workers:
            worker.policy_version = "8"
            worker.introduced_at += 100
        if left == "half updated":
            find_half_updated(fleet)
            assert {worker.reason for worker in fleet.workers} == {"headrace ended in the middle of a weight update"}
        else:
            find(fleet, "paused", "paused")
        await pass_time(mock_clock, 101)
        assert fleet.states == (["quarantined"] * 2 if left == "half updated" else ["ready"] * 2)
        await fleet.update("9")
        await fleet.resume()
        assert fleet.states == ["ready", "ready"]


async def test_a_process_without_a_name_that_is_found_running_is_a_new_one(tmp_path):
    path = str(tmp_path / "journal.sqlite")
    async with administered(journal=path) as fleet:
        forget_the_names(fleet)
        await fleet.start()
    async with administered(journal=path) as fleet:
        forget_the_names(fleet)
        find(fleet, "ready", "ready")
        assert fleet.states == ["ready", "ready"]


async def test_workers_that_may_sleep_when_they_are_found_are_left_alone_and_say_what_to_do(monkeypatch, autojump_clock):
    lines = []
    monkeypatch.setattr(arrivals_module.log, "warning", lambda event, **fields: lines.append((event, fields)))
    async with administered(lease=100.0) as fleet:
        find(fleet, "paused", "paused", sleep=True)
        await trio.sleep(1000)
        unclear = "it was paused or asleep before headrace was, and doesn't tell which; if its weights are whole, "
        unclear += "POST /workers/w0/wake_up ends either"
        assert (fleet.states, fleet.workers[0].reason) == (["paused", "paused"], unclear)
        assert lines[0] == ("fleet.may_sleep", {"worker": "w0", "end": "POST /workers/w0/wake_up", "why": "no administration.journal"})
        fleet.rig.move(fleet.workers[1], "ready")  # somebody has woken it up, or resumed it, behind headrace's back
        await fleet.pausing.wake_up(fleet.workers[:1], [], by="me")
        assert [(worker.state, worker.reason) for worker in fleet.workers] == [("ready", ""), ("ready", "in a test")]
        await fleet.pause()
        assert fleet.workers[0].reason == "by a trainer"


async def test_the_journal_knows_who_slept(mock_clock, tmp_path):
    path = str(tmp_path / "journal.sqlite")
    async with administered(journal=path) as fleet:
        await fleet.pausing.sleep(fleet.workers, 1, "abort", by="me")
        await fleet.pausing.wake_up(fleet.workers[1:], [], by="me")
        await fleet.pausing.pause(fleet.workers[1:], "keep", clear_cache=False, by="me")
    async with administered(lease=100.0, journal=path) as fleet:
        find(fleet, "paused", "paused", sleep=True)
        await wait_all_tasks_blocked()
        assert fleet.workers[0].reason == "it sleeps"
        mock_clock.jump(1000)
        await wait_all_tasks_blocked()
        assert fleet.states == ["paused", "ready"]


async def test_a_fleet_that_sleeps_is_left_alone(autojump_clock):
    async with administered(lease=100.0) as fleet:
        await fleet.pausing.sleep(fleet.workers, 1, "abort", by="me")
        await trio.sleep(1000)
        assert fleet.states == ["paused", "paused"]


# --- who takes part ----------------------------------------------------------------------------------------------------------


async def test_a_fleet_of_several_models_wants_to_know_which():
    async with administered(1, 1, models=["a", "b"]) as fleet:
        with pytest.raises(BadRequest, match="model: the fleet serves a, b; name one"):
            fleet.administration.workers()
        with pytest.raises(NotFound, match="no worker serves 'c'; the fleet serves a, b"):
            fleet.administration.workers("c")
        assert fleet.administration.workers("b") == [fleet.workers[1]]


async def test_workers_that_are_gone_take_no_part():
    async with administered() as fleet:
        fleet.rig.move(fleet.workers[0], "gone")
        assert fleet.administration.workers() == [fleet.workers[1]]
        with pytest.raises(NoWorker, match="worker 'w0' is gone: in a test"):
            fleet.administration.worker("w0")
        with pytest.raises(NotFound, match="there is no worker 'x'; the fleet has w0, w1"):
            fleet.administration.worker("x")
        fleet.rig.move(fleet.workers[1], "gone")
        with pytest.raises(NoWorker, match="no worker is there"):
            fleet.administration.workers()


async def test_a_worker_that_comes_while_the_others_are_paused_waits_with_them():
    async with administered() as fleet:
        late = fleet.workers[1]
        fleet.rig.move(late, "gone")
        await fleet.pause()
        fleet.rig.move(late, "ready")
        assert fleet.states == ["paused", "paused"]
        await fleet.resume()
        assert fleet.states == ["ready", "ready"]


async def test_a_drained_worker_gets_no_calls_until_it_is_released():
    async with administered() as fleet:
        fleet.administration.drain(fleet.workers[0], by="me")
        assert fleet.states == ["draining", "ready"]
        await fleet.pause()
        await fleet.resume()
        assert fleet.states == ["draining", "ready"]
        await fleet.administration.release(fleet.workers[0], by="me")
        assert fleet.states == ["ready", "ready"]


async def test_a_fleet_of_quarantined_workers_is_not_resumed():
    async with administered(1) as fleet:
        fleet.administration.quarantine(fleet.workers[0], "it smells", by="me")
        with pytest.raises(CallError, match="every worker is quarantined: w0: it smells") as refused:
            await fleet.resume()
        assert refused.value.status == 409


async def test_a_fleet_of_quarantined_workers_is_paused_as_far_as_it_can_be():
    async with administered() as fleet:
        for worker in fleet.workers:
            fleet.administration.quarantine(worker, "it smells", by="me")
        fleet.engines[1].fails["pause"] = [broken("it doesn't want to")]
        await fleet.pause(mode="wait")
        assert fleet.engines[0].sent["pause"] == (vllm.PauseMode.KEEP, False)
        assert ([engine.paused for engine in fleet.engines], fleet.states) == ([True, False], ["quarantined", "quarantined"])
        for worker in fleet.workers:
            await fleet.administration.release(worker, by="me")
        assert (fleet.states, fleet.workers[1].reason) == (["paused", "paused"], "it waits for the others, which are paused")
        await fleet.resume()
        assert fleet.states == ["ready", "ready"]
