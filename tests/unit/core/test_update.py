"""One update that headrace drives: all get the weights or are quarantined, and nobody is left paused; on the virtual clock."""

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from core.errors import CallError
from core.wire.generated import vllm
from tests.unit.core.engines import INIT, broken, refused
from tests.unit.core.rig import Browser
from tests.unit.core.transports import fleet_of


async def test_all_pause_get_the_weights_and_a_label_and_go_on():
    async with fleet_of(1, 3) as fleet:
        update = await fleet.update("8", options={"path": "/w"})
        assert [engine.asked for engine in fleet.engines] == [["pause", "start", "update", "finish", "label", "resume"]] * 2
        assert fleet.engines[0].sent["pause"] == (vllm.PauseMode.KEEP, False)
        assert [(worker.state, worker.policy_version) for worker in fleet.workers] == [("ready", "8")] * 2
        [told] = fleet.courier.prepared
        assert (told.id, told.version, told.options) == (update.id, "8", "/w")
        assert [(member.id, member.offset, member.ranks) for member in told.cohort.members] == [("w0", 0, 1), ("w1", 1, 3)]


async def test_an_update_tells_how_far_it_is(autojump_clock):
    async with fleet_of() as fleet:
        fleet.courier.stalls = {step: trio.Event() for step in ("prepare", "w0")}
        update = fleet.ask("8")
        await trio.sleep(1)
        shown = update.describe()
        assert (shown["status"], shown["phase"], shown["workers"]["w0"]["status"]) == ("running", "preparing", "waiting")
        assert fleet.states == ["ready", "ready"]
        fleet.courier.stalls["prepare"].set()
        await trio.sleep(2)
        shown = update.describe()
        assert (shown["phase"], [worker["status"] for worker in shown["workers"].values()]) == ("applying", ["applying"] * 2)
        assert fleet.states == ["updating", "updating"]
        fleet.courier.stalls["w0"].set()
        await update.done.wait()
        assert update.describe() == {
            "id": update.id,
            "version": "8",
            "transport": "courier",
            "status": "succeeded",
            "error": None,
            "phase": "done",
            "workers": {
                "w0": {"status": "done", "reason": "", "seconds": 2.0},
                "w1": {"status": "done", "reason": "", "seconds": 0.0},
            },
            "seconds": 3.0,
            "by": "me",
        }
        [entry] = [entry for entry in fleet.administered.administration.journal.entries if entry.what == "update"]
        progress = update.describe()["workers"]
        told = {"id": update.id, "version": "8", "transport": "courier", "progress": progress, "outcome": "ok", "seconds": 2.0}
        assert entry.detail == told


async def test_calls_that_arrive_meanwhile_wait_and_are_answered():
    async with fleet_of() as fleet, trio.open_nursery() as nursery:
        fleet.courier.stalls["w0"] = trio.Event()
        update = fleet.ask()
        await wait_all_tasks_blocked()
        browser = Browser()
        nursery.start_soon(browser.ask, fleet.administered.rig)
        await wait_all_tasks_blocked()
        assert fleet.administered.rig.fleet.gate.waiting == 1
        fleet.courier.stalls["w0"].set()
        await update.done.wait()
        await wait_all_tasks_blocked()
        assert browser.status == 200


async def test_nobody_is_paused_when_preparing_fails():
    async with fleet_of() as fleet:
        fleet.courier.fails["prepare"] = [CallError(504, "no STABLE within 60 s")]
        update = await fleet.update()
        assert update.describe()["error"] == "no STABLE within 60 s"
        assert {worker["status"] for worker in update.describe()["workers"].values()} == {"unchanged"}
        assert [engine.asked for engine in fleet.engines] == [[], []]
        assert fleet.administered.journal == [("update_asked", None), ("update", "no STABLE within 60 s")]


async def test_when_one_refuses_to_pause_all_go_on_with_the_weights_that_they_have():
    async with fleet_of() as fleet:
        fleet.engines[1].fails["pause"] = [broken("it doesn't want to")]
        update = await fleet.update()
        assert update.failure
        assert update.failure.message == "update failed on w1: it doesn't want to. No worker stays paused by this"
        assert (fleet.states, fleet.paused, fleet.courier.applied) == (["ready", "ready"], [False, False], [])
        assert [(worker["status"], worker["reason"]) for worker in update.describe()["workers"].values()] == [
            ("unchanged", "the update ended before it got the weights"),
            ("failed", "it couldn't be paused: it doesn't want to"),
        ]


async def test_who_does_not_go_on_after_a_pause_that_failed_is_named():
    async with fleet_of() as fleet:
        fleet.engines[0].fails["resume"] = [broken("it hangs")]
        fleet.engines[1].fails["pause"] = [broken("it doesn't want to")]
        update = await fleet.update()
        assert str(update.failure) == (
            "update failed on w1: it doesn't want to. No worker stays paused by this, but for those that didn't resume: w0: it hangs"
        )


async def test_who_fails_is_quarantined_and_the_others_go_on_until_the_next_update_mends_it():
    async with fleet_of() as fleet:
        fleet.engines[0].fails["update"] = [broken("shapes differ")]
        update = await fleet.update("8")
        assert update.failure
        assert update.failure.message == "update failed on w0: shapes differ. Quarantined; the other workers go on"
        assert [(worker["status"], worker["reason"]) for worker in update.describe()["workers"].values()] == [
            ("failed", "shapes differ"),
            ("done", ""),
        ]
        assert (fleet.states, fleet.paused) == (["quarantined", "ready"], [True, False])
        assert fleet.workers[0].reason == "update to '8': shapes differ"
        await fleet.update("9")
        assert (fleet.states, fleet.paused) == (["ready", "ready"], [False, False])
        assert [engine.version for engine in fleet.engines] == ["9", "9"]


async def test_who_was_taken_out_by_hand_gets_the_weights_and_stays_out_until_it_is_released():
    async with fleet_of() as fleet:
        administration = fleet.administered.administration
        administration.quarantine(fleet.workers[0], "it smells", by="me")
        assert (await fleet.update("8")).failure is None
        assert (fleet.states, fleet.workers[0].reason) == (["quarantined", "ready"], "it smells")
        assert ([engine.version for engine in fleet.engines], fleet.paused) == (["8", "8"], [False, False])
        fleet.engines[0].fails["update"] = [broken("no space")]
        await fleet.update("9")
        assert fleet.workers[0].reason == "update to '9': no space"
        await fleet.update("9")
        assert (fleet.states, fleet.workers[0].reason, fleet.paused) == (["quarantined", "ready"], "it smells", [False, False])
        await fleet.administered.update("10")
        assert (fleet.states, fleet.paused) == (["quarantined", "ready"], [False, False])
        await administration.release(fleet.workers[0], by="me")
        assert fleet.states == ["ready", "ready"]


async def test_a_worker_that_labels_its_weights_otherwise_is_quarantined():
    async with fleet_of() as fleet:

        async def forget(request):
            pass

        fleet.engines[1].update_weight_version = forget
        update = await fleet.update("8")
        assert update.failure
        assert "w1: it labels its weights 'default' afterwards" in update.failure.message
        assert fleet.states == ["ready", "quarantined"]


async def test_a_worker_that_is_another_process_afterwards_is_quarantined():
    async with fleet_of() as fleet:
        fleet.engines[1].instance = "2"
        update = await fleet.update("8")
        assert update.failure
        assert "w1: it was replaced by another process meanwhile" in update.failure.message
        assert "label" not in fleet.engines[1].asked


async def test_what_every_worker_refuses_before_it_does_anything_has_changed_nothing():
    async with fleet_of() as fleet:
        for engine in fleet.engines:
            engine.fails["start"] = [refused("no backend")]
        update = await fleet.update()
        assert update.failure
        assert update.failure.message == "update failed on w0: no backend; w1: no backend. Nothing has changed"
        assert (fleet.states, fleet.paused) == (["ready", "ready"], [False, False])


async def test_who_has_done_nothing_when_another_failed_goes_on_as_it_was():
    async with fleet_of() as fleet:
        fleet.engines[0].fails["start"] = [refused("called off")]
        fleet.engines[1].fails["start"] = [broken("died")]
        update = await fleet.update()
        assert update.failure
        wanted = "update failed on w0: called off; w1: died. Quarantined: w1; the other workers go on as they were"
        assert update.failure.message == wanted
        assert (fleet.states, fleet.paused) == (["ready", "quarantined"], [False, True])
        assert fleet.engines[0].version == "default"


async def test_who_has_done_nothing_while_another_got_the_weights_is_quarantined():
    async with fleet_of() as fleet:
        fleet.engines[0].fails["start"] = [refused("called off")]
        await fleet.update()
        assert (fleet.states, fleet.paused) == (["quarantined", "ready"], [True, False])


async def test_an_update_tells_of_a_failure_while_the_others_are_in_it(autojump_clock):
    async with fleet_of() as fleet:
        fleet.courier.fails["w0"] = [CallError(500, "no such file")]
        fleet.courier.stalls = {"w1": trio.Event()}
        update = fleet.ask()
        await trio.sleep(1)
        told = update.describe()
        assert (told["status"], told["workers"]["w0"]) == ("running", {"status": "failed", "reason": "no such file", "seconds": 0.0})
        assert told["workers"]["w1"]["status"] == "applying"
        fleet.courier.stalls["w1"].set()
        await update.done.wait()


async def test_what_every_worker_refuses_half_way_leaves_all_quarantined():
    async with fleet_of() as fleet:
        for engine in fleet.engines:
            engine.fails["update"] = [refused("no such tensor")]
        update = await fleet.update()
        assert update.failure
        assert "no worker has the weights" in update.failure.message
        assert (fleet.states, fleet.paused) == (["quarantined", "quarantined"], [True, True])
        await fleet.update("9")
        assert fleet.states == ["ready", "ready"]


@pytest.mark.parametrize("fault", [LookupError("mine"), SystemExit(2)])
async def test_a_fault_of_the_transport_is_a_failure_like_any_other(fault):
    async with fleet_of() as fleet:
        fleet.courier.fails["w0"] = [fault]
        fleet.courier.fails["w1"] = [trio.TooSlowError()]
        update = await fleet.update()
        assert update.failure
        name, courier = type(fault).__name__, "the transport 'courier'"
        assert f"w0: a fault of {courier}: {name}; w1: {courier} has lost patience" in update.failure.message
        fleet.courier.fails["prepare"] = [fault]
        update = await fleet.update()
        assert update.failure
        assert update.failure.message == f"update: a fault of {courier}: {name}"


async def test_the_others_of_a_group_are_given_up_when_one_has_failed(autojump_clock):
    async with fleet_of(repeatable=False, deadline=5.0) as fleet:
        fleet.courier.fails["w0"] = [CallError(500, "died")]
        fleet.courier.stalls["w1"] = trio.Event()
        update = await fleet.update()
        assert update.failure
        assert "w0: died; w1: not done 5 s after another worker had failed" in update.failure.message
        assert trio.current_time() == 5


async def test_a_worker_that_is_lost_before_the_pause_is_done_without_when_the_transport_can():
    async with fleet_of() as fleet:
        fleet.courier.stalls["prepare"] = trio.Event()
        update, pinned = fleet.ask("8"), fleet.ask("8", pinned=True)
        await wait_all_tasks_blocked()
        fleet.administered.rig.move(fleet.workers[1], "gone")
        fleet.courier.stalls["prepare"].set()
        await update.done.wait()
        await pinned.done.wait()
        assert (update.failure, fleet.engines[0].version) == (None, "8")
        assert update.progress["w1"].reason == "it is gone; when it comes back it is held out until it has the weights"
        assert pinned.failure
        assert pinned.failure.status == 409


async def test_a_pause_of_the_trainers_own_outlasts_the_update():
    async with fleet_of() as fleet:
        await fleet.administered.pause()
        await fleet.update("8")
        assert (fleet.states, fleet.paused) == (["paused", "paused"], [True, True])
        await fleet.administered.resume()
        assert fleet.states == ["ready", "ready"]


async def test_a_quarantined_worker_whose_trainer_has_resumed_the_others_goes_on_with_them_once_it_is_whole():
    async with fleet_of() as fleet:
        await fleet.administered.pause()
        fleet.engines[0].fails["update"] = [broken("no space")]
        await fleet.update("7")
        await fleet.administered.resume()
        await fleet.update("8")
        assert (fleet.states, fleet.paused) == (["ready", "ready"], [False, False])


async def test_a_group_that_is_not_whole_any_more_is_not_updated():
    async with fleet_of(repeatable=False) as fleet:
        fleet.courier.stalls["prepare"] = trio.Event()
        update = fleet.ask()
        await wait_all_tasks_blocked()
        fleet.administered.rig.move(fleet.workers[1], "gone")
        fleet.courier.stalls["prepare"].set()
        await update.done.wait()
        assert update.failure
        assert (update.failure.status, update.failure.message) == (409, "update: the cohort has changed: w1 is gone. Ask again")
        assert "pause" not in fleet.engines[0].asked


async def test_an_update_through_a_trainers_group_is_refused_when_there_is_none():
    async with fleet_of(repeatable=False, grouped=True) as fleet:
        update = await fleet.update()
        assert update.failure
        assert (update.failure.status, "headrace knows of none: let all join one first" in update.failure.message) == (409, True)
        assert [engine.asked for engine in fleet.engines] == [[], []]
        await fleet.administered.joining.join(fleet.workers, lambda cohort, index: INIT, by="me")
        assert (await fleet.update()).failure is None


async def test_an_update_that_needs_no_group_is_done_whatever_has_become_of_one():
    async with fleet_of(repeatable=False) as fleet:
        await fleet.administered.joining.join(fleet.workers[:1], lambda cohort, index: INIT, by="me")
        assert (await fleet.update()).failure is None


async def test_a_trainers_group_that_is_not_whole_any_more_is_waited_for_by_nobody():
    async with fleet_of(repeatable=False, grouped=True) as fleet:
        await fleet.administered.joining.join(fleet.workers[:1], lambda cohort, index: INIT, by="me")
        update = await fleet.update()
        assert update.failure
        assert (update.failure.status, "w1 is not in it" in update.failure.message) == (409, True)
        assert "pause" not in fleet.engines[0].asked
