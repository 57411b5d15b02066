"""Workers that come late, or back: nobody takes calls with weights that the fleet no longer has."""

from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from msgspec.structs import replace
from trio.testing import wait_all_tasks_blocked

from core.errors import BadRequest
from core.fleet import latecomers as latecomers_module
from core.fleet.progress import Update, UpdateRequest
from core.fleet.worker import Worker
from tests.unit.core.engines import INIT, AdministeredFleet, Engine, administered, broken, refused, serve_http
from tests.unit.core.transports import Courier

HELP = "update the fleet, or take it as it is (POST /fleet/workers/w1/release)"


class Fleet:
    """A fleet under administration, whose processes can be started anew."""

    def __init__(self, fleet: AdministeredFleet, courier: Courier) -> None:
        self.administered, self.courier = fleet, courier
        self.engines, self.workers = fleet.engines, fleet.workers

    async def update(self, version: str = "8", workers: list[Worker] | None = None, **options: Any) -> Update:
        administration = self.administered.administration
        request = UpdateRequest(version, "courier", options)
        update = administration.updates.ask(request, workers or administration.workers(), by="me")
        await update.done.wait()
        return update

    def leave(self, worker: Worker) -> None:
        self.administered.rig.move(worker, "gone")

    def come(self, worker: Worker) -> None:
        """The same process as before."""
        self.administered.rig.move(worker, "ready")

    def restart(self, index: int) -> Engine:
        """Another process, with the weights that a checkpoint has."""
        worker, engine = self.workers[index], self.engines[index]
        assert worker.info
        if worker.is_there:
            self.leave(worker)
        engine.version, engine.paused, engine.updating, engine.broken = "default", False, False, False
        engine.instance = str(int(engine.instance) + 1)
        worker.info = replace(worker.info, instance_id=engine.instance)
        worker.policy_version = engine.version
        self.come(worker)
        return engine

    @property
    def states(self) -> list[str]:
        return self.administered.states


@asynccontextmanager
async def fleet_of(*world_sizes: int, repeatable: bool = True, **settings: Any):
    courier = Courier(repeatable=repeatable)
    async with administered(*world_sizes, transports=[courier], **settings) as fleet:
        yield Fleet(fleet, courier)


async def test_a_fleet_that_was_never_updated_holds_nobody_out():
    async with fleet_of() as fleet:
        fleet.restart(1)
        assert fleet.states == ["ready", "ready"]


async def test_a_new_process_is_brought_up_to_date_at_once_by_itself():
    async with fleet_of() as fleet:
        await fleet.update("8", path="/w")
        engine = fleet.restart(1)
        assert fleet.states == ["ready", "quarantined"]
        assert fleet.workers[1].reason == f"it has the weights 'default' and should have '8': {HELP}"
        await wait_all_tasks_blocked()
        assert fleet.states == ["ready", "ready"]
        assert (engine.version, fleet.courier.prepared[-1].options) == ("8", "/w")
        assert sorted(fleet.courier.applied) == [("w0", "8"), ("w1", "8"), ("w1", "8")]
        assert fleet.administered.administration.updates.latest()[0].by == "headrace"


async def test_a_process_that_has_loaded_the_current_weights_by_itself_joins():
    async with fleet_of() as fleet:
        await fleet.update("8")
        fleet.leave(fleet.workers[1])
        assert fleet.workers[1].info
        fleet.workers[1].info = replace(fleet.workers[1].info, instance_id="2")
        fleet.workers[1].policy_version = "8"
        fleet.come(fleet.workers[1])
        assert fleet.states == ["ready", "ready"]


@pytest.mark.parametrize(
    "body",
    [
        {"method": "reload_weights", "kwargs": {"weights_path": "/out/step_8"}},
        {"method": "update_weights_from_path", "args": ["/out/step_8"]},
        {"method": "update_weights_from_path", "kwargs": {"weight_dir": "/out/step_8"}},
    ],
)
async def test_a_new_process_gets_what_a_trainers_method_has_read_from_a_path(body):
    async with fleet_of() as fleet:
        sent = [serve_http(worker, {"results": [None]}) for worker in fleet.workers]
        await fleet.administered.methods.call(fleet.workers, body, by="me")
        await fleet.administered.updating.label(fleet.workers, "8", by="me")
        engine = fleet.restart(1)
        assert fleet.states == ["ready", "quarantined"]
        await wait_all_tasks_blocked()
        assert (fleet.states, engine.version, [len(bodies) for bodies in sent]) == (["ready", "ready"], "8", [1, 2])
        assert sent[1][1] == {"args": [], "kwargs": {}} | body


@pytest.mark.parametrize(
    "body",
    [
        {"method": "reload_weights"},
        {"method": "reload_weights", "kwargs": {"weights_iterator": [["w", 1]], "weights_path": "/w"}},
        {"method": "update_weights_from_path", "args": [None]},
    ],
)
async def test_what_a_trainers_method_has_read_from_elsewhere_nobody_can_bring_again(body):
    async with fleet_of() as fleet:
        for worker in fleet.workers:
            serve_http(worker, {"results": [None]})
        await fleet.administered.methods.call(fleet.workers, body, by="me", version="8")
        fleet.restart(1)
        await wait_all_tasks_blocked()
        assert fleet.states == ["ready", "quarantined"]


async def test_what_came_through_a_trainers_group_nobody_can_bring_again():
    async with fleet_of() as fleet:
        for worker in fleet.workers:
            serve_http(worker, {"results": [None]})
        await fleet.administered.joining.join(fleet.workers, lambda cohort, index: INIT, by="me")
        body = {"method": "update_weights_from_path", "args": ["/out/step_8"]}
        await fleet.administered.methods.call(fleet.workers, body, by="me", version="8")
        fleet.restart(1)
        await wait_all_tasks_blocked()
        assert fleet.states == ["ready", "quarantined"]


async def test_a_method_is_no_transport_for_others():
    async with fleet_of() as fleet:
        with pytest.raises(BadRequest, match="there is no weight transport 'reload_weights'"):
            fleet.administered.administration.updates.ask(UpdateRequest("8", "reload_weights", {}), fleet.workers, by="me")


async def test_without_a_transport_that_can_do_it_again_a_new_process_is_held_out_until_the_next_update():
    async with fleet_of(repeatable=False) as fleet:
        await fleet.update("8")
        fleet.restart(1)
        await wait_all_tasks_blocked()
        assert fleet.states == ["ready", "quarantined"]
        await fleet.update("9")
        assert fleet.states == ["ready", "ready"]


async def test_a_new_process_may_be_taken_as_it_is():
    async with fleet_of(repeatable=False) as fleet:
        await fleet.update("8")
        fleet.restart(1)
        await fleet.administered.administration.release(fleet.workers[1], by="me")
        assert fleet.states == ["ready", "ready"]
        fleet.leave(fleet.workers[1])
        fleet.come(fleet.workers[1])
        assert fleet.states == ["ready", "ready"]


async def test_a_fleet_of_new_processes_is_healed_by_a_trainer_that_pauses_first():
    async with fleet_of(repeatable=False) as fleet:
        await fleet.update("8")
        for index, worker in enumerate(fleet.workers):
            fleet.restart(index)
            serve_http(worker, {"results": [None]})
        assert fleet.states == ["quarantined", "quarantined"]
        await fleet.administered.pause()
        assert await fleet.administered.administration.is_paused(fleet.workers)
        await fleet.administered.methods.call(fleet.workers, {"method": "reload_weights"}, by="me", version="9")
        assert (fleet.states, [engine.paused for engine in fleet.engines]) == (["paused", "paused"], [True, True])
        await fleet.administered.resume()
        assert (fleet.states, [engine.paused for engine in fleet.engines]) == (["ready", "ready"], [False, False])


async def test_the_only_worker_of_a_model_is_held_out_as_well():
    async with fleet_of(1, repeatable=False) as fleet:
        await fleet.update("8")
        fleet.restart(0)
        assert fleet.states == ["quarantined"]
        assert "POST /fleet/workers/w0/release" in fleet.workers[0].reason


async def test_a_process_that_was_away_during_an_update_has_missed_it():
    async with fleet_of() as fleet:
        await fleet.update("8")
        fleet.leave(fleet.workers[1])
        await fleet.update("9")
        fleet.come(fleet.workers[1])
        assert fleet.states == ["ready", "quarantined"]
        await wait_all_tasks_blocked()
        assert (fleet.states, fleet.engines[1].version) == (["ready", "ready"], "9")


async def test_a_process_that_was_away_between_updates_has_missed_none():
    async with fleet_of() as fleet:
        await fleet.administered.update(None)  # without a version
        fleet.leave(fleet.workers[1])
        fleet.come(fleet.workers[1])
        assert fleet.states == ["ready", "ready"]


async def test_an_update_by_the_trainers_own_steps_counts():
    async with fleet_of() as fleet:
        await fleet.administered.update("8")
        fleet.restart(1)
        await wait_all_tasks_blocked()
        assert fleet.states == ["ready", "quarantined"]
        assert fleet.workers[1].reason == f"it has the weights 'default' and should have '8': {HELP}"


async def test_after_an_update_without_a_version_nobody_can_tell_until_it_gets_one():
    async with fleet_of() as fleet:
        for worker in fleet.workers:
            serve_http(worker, {"results": [None]})
        await fleet.administered.methods.call(fleet.workers, {"method": "reload_weights"}, by="me")
        fleet.restart(1)
        assert fleet.states == ["ready", "quarantined"]
        assert "an update without a version" in fleet.workers[1].reason
        await fleet.administered.administration.release(fleet.workers[1], by="me")
        await fleet.administered.updating.label(fleet.workers, "8", by="me")
        fleet.restart(1)
        assert "should have '8'" in fleet.workers[1].reason


async def test_a_trainer_that_updates_each_worker_by_itself_holds_nobody_out():
    async with fleet_of() as fleet:
        await fleet.update("8")
        await fleet.update("9", fleet.workers[:1])
        fleet.leave(fleet.workers[0])
        fleet.come(fleet.workers[0])
        assert (fleet.states, fleet.engines[0].version) == (["ready", "ready"], "9")
        await fleet.update("9", fleet.workers[1:])
        fleet.restart(0)
        assert "should have '9'" in fleet.workers[0].reason


async def test_a_new_process_that_the_update_has_taken_for_the_one_before_is_brought_up_to_date_after_it():
    async with fleet_of() as fleet, trio.open_nursery() as nursery:
        fleet.engines[0].stalls["pause"] = trio.Event()
        nursery.start_soon(fleet.administered.pause)  # the update waits for its turn
        await wait_all_tasks_blocked()
        nursery.start_soon(fleet.update)
        await wait_all_tasks_blocked()
        fleet.restart(1)
        fleet.engines[0].stalls["pause"].set()
        await wait_all_tasks_blocked()
        await fleet.administered.resume()
        assert (fleet.states, [engine.version for engine in fleet.engines]) == (["ready", "ready"], ["8", "8"])


async def test_a_new_process_in_the_middle_of_an_update_is_brought_up_to_date_after_it():
    async with fleet_of() as fleet:
        fleet.courier.stalls["w0"] = trio.Event()
        fleet.engines[1].fails["start"] = [broken("the connection broke")]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fleet.update)
            await wait_all_tasks_blocked()
            fleet.restart(1)
            await wait_all_tasks_blocked()
            assert fleet.states == ["updating", "quarantined"]
            fleet.courier.stalls["w0"].set()
        await wait_all_tasks_blocked()
        assert (fleet.states, [engine.version for engine in fleet.engines]) == (["ready", "ready"], ["8", "8"])


async def test_a_worker_that_is_new_in_the_middle_of_an_update_gets_no_call_with_the_weights_of_before():
    async with fleet_of(1, 1, repeatable=False) as fleet:
        fleet.leave(fleet.workers[1])
        fleet.courier.stalls["w0"] = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fleet.update)
            await wait_all_tasks_blocked()
            fleet.restart(1)
            assert fleet.states == ["updating", "paused"]
            fleet.courier.stalls["w0"].set()
        assert fleet.states == ["ready", "quarantined"]


async def test_a_worker_that_is_new_in_the_middle_of_an_update_that_nobody_gets_goes_on():
    async with fleet_of(1, 1, 1) as fleet:
        fleet.leave(fleet.workers[2])
        fleet.courier.stalls["w0"] = trio.Event()
        for engine in fleet.engines:
            engine.fails["start"] = [refused("no backend")]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fleet.update)
            await wait_all_tasks_blocked()
            fleet.restart(2)
            assert fleet.states[2] == "paused"
            fleet.courier.stalls["w0"].set()
        assert fleet.states == ["ready"] * 3


async def test_a_late_worker_whose_weights_the_settings_no_longer_allow_is_held_out(monkeypatch):
    async with fleet_of() as fleet:
        await fleet.update("8", path="/w")

        def parse(options):
            raise BadRequest("path: not any more", param="path")

        fleet.courier.parse = parse
        lines = []
        monkeypatch.setattr(latecomers_module.log, "error", lambda event, **fields: lines.append((event, fields["reason"])))
        fleet.restart(1)
        await wait_all_tasks_blocked()
        assert fleet.states == ["ready", "quarantined"]
        assert lines == [("fleet.late", "path: not any more")]
        del fleet.courier.parse
        await fleet.update("9")
        assert fleet.states == ["ready", "ready"]


async def test_a_late_worker_waits_with_the_others_that_a_trainer_has_paused():
    async with fleet_of() as fleet:
        await fleet.update("8")
        await fleet.administered.pause()
        engine = fleet.restart(1)
        await wait_all_tasks_blocked()
        assert (fleet.states, engine.version, engine.paused) == (["paused", "paused"], "8", True)
        await fleet.administered.resume()
        assert (fleet.states, engine.paused) == (["ready", "ready"], False)


async def test_a_worker_that_can_not_be_brought_up_to_date_is_quarantined_with_the_reason():
    async with fleet_of() as fleet:
        await fleet.update("8")
        fleet.engines[1].fails["update"] = [broken("no such file")]
        fleet.restart(1)
        await wait_all_tasks_blocked()
        assert (fleet.states, fleet.workers[1].reason) == (["ready", "quarantined"], "update to '8': no such file")
        await fleet.update("9")
        assert fleet.states == ["ready", "ready"]


async def test_a_worker_that_failed_and_was_away_is_tried_again():
    async with fleet_of() as fleet:
        fleet.engines[1].fails["update"] = [broken("the connection broke")]
        await fleet.update("8")
        assert fleet.states == ["ready", "quarantined"]
        fleet.leave(fleet.workers[1])
        fleet.come(fleet.workers[1])
        await wait_all_tasks_blocked()
        assert (fleet.states, [engine.version for engine in fleet.engines]) == (["ready", "ready"], ["8", "8"])


async def test_who_was_quarantined_by_hand_stays_so():
    async with fleet_of() as fleet:
        await fleet.update("8")
        fleet.administered.administration.quarantine(fleet.workers[1], "it smells", by="me")
        fleet.restart(1)
        await wait_all_tasks_blocked()
        assert (fleet.states, fleet.workers[1].reason) == (["ready", "quarantined"], "it smells")


async def test_each_cohort_has_weights_of_its_own():
    async with fleet_of(1, 1, 1) as fleet:
        administration = fleet.administered.administration
        administration.select_cohort("a", "", ["w1"], substitution=True, by="me")
        await fleet.update("8", administration.select(cohort="a"))
        fleet.restart(0)
        assert fleet.states == ["ready"] * 3
        fleet.restart(1)
        assert fleet.workers[1].reason == f"it has the weights 'default' and should have '8': {HELP}"
        await wait_all_tasks_blocked()
        assert fleet.states == ["ready"] * 3


# --- over a restart of headrace -----------------------------------------------------------------------------------------------


async def test_a_new_headrace_knows_the_weights_that_the_fleet_has(tmp_path):
    path = str(tmp_path / "journal.sqlite")
    async with fleet_of(journal=path) as fleet:
        await fleet.update("8", path="/w")
        await fleet.administered.administration.journal.flush()
    async with fleet_of(journal=path) as fleet:
        for worker in fleet.workers:
            worker.policy_version = "8"
            fleet.leave(worker)
            fleet.come(worker)
        assert fleet.states == ["ready", "ready"]
        fleet.restart(1)
        assert fleet.states == ["ready", "quarantined"]
        await wait_all_tasks_blocked()
        await fleet.administered.administration.updates.latest()[0].done.wait()
        assert (fleet.states, fleet.courier.prepared[0].options) == (["ready", "ready"], "/w")


async def test_a_new_headrace_brings_back_whom_the_one_before_has_left_half_way(tmp_path):
    path = str(tmp_path / "journal.sqlite")
    async with fleet_of(journal=path) as fleet, trio.open_nursery() as nursery:
        await fleet.update("8")
        fleet.courier.stalls = {name: trio.Event() for name in ("w0", "w1")}
        nursery.start_soon(fleet.update, "9")
        with trio.fail_after(5):
            while len(fleet.courier.applied) < 4:
                await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
    async with fleet_of(journal=path) as fleet:
        for worker, engine in zip(fleet.workers, fleet.engines, strict=True):
            worker.policy_version, engine.paused = "8", True
            fleet.leave(worker)
            fleet.administered.rig.move(worker, "paused")
        assert {worker.reason for worker in fleet.workers} == {"headrace ended in the middle of a weight update"}
        with trio.fail_after(5):
            while fleet.states != ["ready", "ready"]:
                await trio.lowlevel.checkpoint()
        assert [(engine.version, engine.paused) for engine in fleet.engines] == [("8", False)] * 2


async def test_a_new_headrace_resumes_whom_the_one_before_had_only_paused(tmp_path):
    path = str(tmp_path / "journal.sqlite")
    async with fleet_of(journal=path) as fleet, trio.open_nursery() as nursery:
        fleet.engines[1].stalls["pause"] = trio.Event()
        nursery.start_soon(fleet.update, "9")
        await wait_all_tasks_blocked()
        await fleet.administered.administration.journal.flush()
        nursery.cancel_scope.cancel()
    async with fleet_of(journal=path) as fleet:
        for worker, engine in zip(fleet.workers, fleet.engines, strict=True):
            engine.paused = True
            fleet.leave(worker)
            fleet.administered.rig.move(worker, "paused")
        await wait_all_tasks_blocked()
        assert (fleet.states, [engine.paused for engine in fleet.engines]) == (["ready", "ready"], [False, False])
        assert ("left_paused", "ok") in fleet.administered.journal
