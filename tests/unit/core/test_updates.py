"""Updates as they are asked for: joined, in turn, overtaken, given up, remembered; on the virtual clock."""

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from core.errors import BadRequest, CallError, NotFound
from core.fleet.progress import UpdateRequest
from core.fleet.transport import by_name
from core.fleet.updates import KEPT
from core.settings import SettingsError
from tests.unit.core.transports import Courier, fleet_of


async def test_what_is_posted_again_joins_the_update_that_runs():
    async with fleet_of() as fleet:
        fleet.courier.stalls["w0"] = trio.Event()
        first = fleet.ask("8")
        await wait_all_tasks_blocked()
        assert fleet.ask("8") is first
        assert fleet.ask("8", options={"path": "/w"}) is not first
        fleet.courier.stalls["w0"].set()
        await first.done.wait()
        await wait_all_tasks_blocked()
        assert fleet.ask("8") is not first


async def test_updates_of_the_same_workers_come_one_after_the_other():
    async with fleet_of() as fleet:
        fleet.courier.stalls["w0"] = trio.Event()
        updates = [fleet.ask("8")]
        await wait_all_tasks_blocked()
        updates += [fleet.ask("9"), fleet.ask("8")]
        await wait_all_tasks_blocked()
        assert [told.version for told in fleet.courier.prepared] == ["8"]
        assert fleet.courier.applied == [("w0", "8"), ("w1", "8")] or fleet.courier.applied == [("w1", "8"), ("w0", "8")]
        fleet.courier.stalls["w0"].set()
        for update in updates:
            await update.done.wait()
        assert [engine.version for engine in fleet.engines] == ["8", "8"]


async def test_one_that_is_still_preparing_is_overtaken_and_never_follows():
    async with fleet_of() as fleet:
        stall = fleet.courier.stalls["prepare"] = trio.Event()
        early = fleet.ask("8")
        await wait_all_tasks_blocked()
        del fleet.courier.stalls["prepare"]
        late = await fleet.update("9")
        assert not stall.is_set(), "its marker would come after minutes, or never"
        await early.done.wait()
        assert (late.failure, [engine.version for engine in fleet.engines]) == (None, ["9", "9"])
        assert early.failure
        assert (early.failure.status, early.failure.message) == (
            409,
            f"update: overtaken by that to version '9' ({late.id}), asked for later",
        )


async def test_one_that_is_given_up_while_it_prepares_has_paused_nobody():
    async with fleet_of() as fleet:
        fleet.courier.stalls["prepare"] = trio.Event()
        update = fleet.ask("8")
        await wait_all_tasks_blocked()
        update.give_up("somebody")
        await update.done.wait()
        assert update.failure
        assert (update.failure.message, fleet.engines[0].asked) == ("update: given up by somebody", [])


async def test_one_that_is_given_up_while_workers_pause_ends_at_once_and_they_go_on():
    async with fleet_of() as fleet:
        fleet.engines[1].stalls["pause"] = trio.Event()  # a long call is running there
        update = fleet.ask("8", mode="wait")
        await wait_all_tasks_blocked()
        assert (update.phase, fleet.states) == ("pausing", ["paused", "paused"])
        update.give_up("somebody")
        await update.done.wait()
        assert update.failure
        assert (update.failure.status, update.failure.message) == (409, "update: given up by somebody")
        assert (fleet.states, fleet.paused, fleet.courier.applied) == (["ready", "ready"], [False, False], [])
        assert fleet.administered.journal[-1] == ("update", "update: given up by somebody")


async def test_who_goes_on_after_an_update_was_given_up_waits_for_nobody_else(autojump_clock):
    async with fleet_of(deadline=60.0) as fleet:
        fleet.engines[1].stalls = {"pause": trio.Event(), "resume": trio.Event()}  # it hangs
        update = fleet.ask("8")
        await trio.sleep(1)
        update.give_up("somebody")
        await trio.sleep(1)
        assert fleet.states == ["ready", "paused"]
        await update.done.wait()
        assert (fleet.paused, fleet.courier.applied) == ([False, False], [])


async def test_one_that_is_given_up_while_it_waits_for_its_turn_ends_at_once():
    async with fleet_of() as fleet, trio.open_nursery() as nursery:
        fleet.engines[1].stalls["pause"] = trio.Event()
        nursery.start_soon(fleet.administered.pause)
        await wait_all_tasks_blocked()
        update = fleet.ask("8")
        await wait_all_tasks_blocked()
        update.give_up("somebody")
        await update.done.wait()
        assert update.failure
        assert update.failure.message == "update: given up by somebody"
        fleet.engines[1].stalls["pause"].set()
        await wait_all_tasks_blocked()
        assert (fleet.states, fleet.paused, fleet.courier.applied) == (["paused", "paused"], [True, True], [])


async def test_one_that_is_given_up_while_workers_get_their_weights_leaves_these_quarantined():
    async with fleet_of(repeatable=False) as fleet:
        fleet.courier.stalls["w1"] = trio.Event()  # its trainer is dead, say, and nobody will ever send
        update = fleet.ask("8")
        await wait_all_tasks_blocked()
        update.give_up("somebody")
        await update.done.wait()
        assert (fleet.states, fleet.paused) == (["ready", "quarantined"], [False, True])
        assert fleet.workers[1].reason == "update to '8': given up by somebody"


async def test_an_update_by_steps_that_is_open_is_not_destroyed(autojump_clock):
    async with fleet_of() as fleet:
        await fleet.administered.start()
        await trio.sleep(5)
        with pytest.raises(
            CallError, match=r"update: me has started a weight update on w0, w1 5 s ago .* and has not finished it"
        ) as refused:
            fleet.ask("9")
        assert (refused.value.status, '"force": true' in refused.value.message) == (409, True)
        await fleet.administered.receive()
        await fleet.administered.finish("8")
        assert [engine.version for engine in fleet.engines] == ["8", "8"]
        assert (await fleet.update("9")).failure is None


async def test_an_update_by_steps_that_is_begun_while_another_one_prepares_is_not_destroyed():
    async with fleet_of() as fleet:
        fleet.courier.stalls["prepare"] = trio.Event()
        update = fleet.ask("9")
        await wait_all_tasks_blocked()
        await fleet.administered.start()
        fleet.courier.stalls["prepare"].set()
        await update.done.wait()
        assert update.failure
        assert (update.failure.status, fleet.courier.applied) == (409, [])
        await fleet.administered.receive()
        await fleet.administered.finish("8")
        assert fleet.states == ["ready", "ready"]


async def test_an_update_takes_the_place_of_one_whose_trainer_has_died_half_way_when_it_says_so():
    async with fleet_of() as fleet:
        await fleet.administered.start()
        await fleet.administered.receive()
        update = await fleet.update("8", force=True)
        assert update.failure is None
        assert (fleet.states, fleet.paused) == (["ready", "ready"], [False, False])


async def test_what_is_wrong_is_refused_by_name():
    async with fleet_of() as fleet:
        with pytest.raises(BadRequest, match="pathh: this transport doesn't know it"):
            fleet.ask(options={"pathh": "/w"})
        updates, workers = fleet.administered.administration.updates, fleet.workers
        with pytest.raises(BadRequest, match="there is no weight transport 'courrier'; did you mean 'courier'") as wrong:
            updates.ask(UpdateRequest("8", "courrier", {}), workers, by="me")
        assert wrong.value.param == "transport"
        with pytest.raises(NotFound, match="there is no update 'x'"):
            updates.get("x")


async def test_the_latest_updates_are_remembered():
    async with fleet_of(1) as fleet:
        updates = [await fleet.update(str(number)) for number in range(KEPT + 3)]
        latest = fleet.administered.administration.updates.latest()
        assert latest[0] is updates[-1]
        assert len(latest) == KEPT + 1  # the new one was running when the last one was forgotten


def test_two_transports_of_one_name_end_the_start():
    with pytest.raises(SettingsError, match="weight transport 'courier' is offered by the plugins 'a' and 'b'; disable one"):
        by_name([("a", Courier()), ("b", Courier())])
