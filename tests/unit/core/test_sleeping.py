"""Putting the fleet to sleep and waking it up: whoever has no whole weights takes no calls."""

import pytest

from core.errors import CallError
from core.fleet import pausing as pausing_module
from core.fleet.operations import FleetFailed
from core.fleet.standing import Standing
from core.wire.generated import vllm
from tests.unit.core.engines import administered, broken, serve_http


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
