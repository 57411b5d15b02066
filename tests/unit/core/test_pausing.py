"""Pausing and resuming the fleet: all of it or none, whoever leaves; on the virtual clock."""

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from core.errors import BadRequest, CallError, NotFound, NoWorker
from core.fleet import operations as operations_module
from core.fleet.operations import FleetFailed
from core.wire.generated import vllm
from tests.unit.core.engines import administered, broken
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
