"""What becomes of updates when headrace ends, and what the next one knows of them."""

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from core.errors import CallError
from core.fleet.progress import UpdateRequest
from tests.unit.core.transports import fleet_of


async def test_a_new_headrace_says_which_updates_the_one_before_has_not_ended(tmp_path):
    path = str(tmp_path / "journal.sqlite")
    async with fleet_of(journal=path) as fleet:
        done = await fleet.update("7")
        fleet.courier.stalls["prepare"] = trio.Event()
        cut = fleet.ask("8")
        await fleet.administered.administration.journal.flush()
        fleet.administered.administration.journal._path = ""  # nothing more is written: it was killed
    async with fleet_of(journal=path) as fleet:
        updates = fleet.administered.administration.updates
        shown = updates.describe(cut.id)
        assert (shown["status"], shown["version"], shown["error"]) == ("failed", "8", "headrace ended in the middle of it")
        assert updates.describe(done.id) == {**done.describe(), "seconds": updates.describe(done.id)["seconds"]}
        later = await fleet.update("9")
        assert [one["id"] for one in updates.describe_all()] == [later.id, cut.id, done.id]
    async with fleet_of(journal=path) as fleet:
        journal = fleet.administered.administration.journal
        assert [entry.detail["outcome"] for entry in journal.entries if entry.what == "update"] == [
            "ok",
            "headrace ended in the middle of it",
            "ok",
        ]


async def test_an_update_that_prepares_or_pauses_is_given_up_when_headrace_is_going_to_end():
    async with fleet_of() as fleet:
        fleet.engines[1].stalls["pause"] = trio.Event()
        pausing = fleet.ask("7", mode="wait")
        await wait_all_tasks_blocked()
        preparing = fleet.ask("8")
        await wait_all_tasks_blocked()
        fleet.administered.administration.updates.stop()
        for update in (pausing, preparing):
            await update.done.wait()
            assert update.failure
            assert (update.failure.status, update.failure.message) == (503, "update: headrace ends; nobody got the weights")
        assert (fleet.states, fleet.paused, fleet.courier.applied) == (["ready", "ready"], [False, False], [])
        with pytest.raises(CallError, match="headrace ends"):
            fleet.ask("9")


async def test_one_whose_workers_are_getting_their_weights_goes_on_for_as_long_as_headrace():
    async with fleet_of() as fleet:
        fleet.courier.stalls["w0"] = trio.Event()
        update = fleet.ask("8")
        await wait_all_tasks_blocked()
        fleet.administered.administration.updates.stop()
        fleet.courier.stalls["w0"].set()
        await update.done.wait()
        assert (update.failure, fleet.states) == (None, ["ready", "ready"])


async def test_at_its_end_headrace_resumes_whom_it_has_paused_unless_their_weights_are_not_whole():
    async with fleet_of(1, 1, 1) as fleet:
        administration = fleet.administered.administration
        fleet.courier.stalls["w1"] = trio.Event()
        administration.updates.ask(UpdateRequest("8", "courier", {}), fleet.workers[1:2], by="me")
        await fleet.administered.pausing.pause(fleet.workers[2:], "keep", clear_cache=False, by="me")
        fleet.engines[0].stalls["pause"] = trio.Event()
        update = administration.updates.ask(UpdateRequest("8", "courier", {}, "wait"), fleet.workers[:1], by="me")
        await wait_all_tasks_blocked()
        fleet.engines[0].paused = True  # it has, and its answer is on its way
        await administration.end()
        assert fleet.paused == [False, True, True]
        assert update.failure
        assert update.failure.status == 503


async def test_whoever_waits_for_an_update_when_headrace_ends_is_told():
    async with fleet_of() as fleet:
        fleet.courier.stalls["w0"] = trio.Event()
        update = fleet.ask()
        await wait_all_tasks_blocked()
    assert update.failure
    assert "headrace ends" in update.failure.message
