"""Updates that trainers carry out themselves: whose they are, how they are shown and counted, and how they end; on the virtual clock."""

from functools import partial

import httpx
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from core.errors import CallError
from core.fleet.operations import FleetFailed
from core.northbound.updates import add_update_routes
from core.routes import Routes
from tests.unit.core.engines import UPDATE, AdministeredFleet, administered, broken, refused, restart, serve_http
from tests.unit.core.test_routes import ask
from tests.unit.core.transports import fleet_of


def shown(fleet: AdministeredFleet) -> list[tuple[str, str, str | None, str]]:
    """Transport, status, version and client of each update, the newest first."""
    return [(one["transport"], one["status"], one["version"], one["by"]) for one in fleet.administration.updates.describe_all()]


def counted(fleet: AdministeredFleet) -> list[str]:
    return [line for line in fleet.rig.metrics.text().decode().splitlines() if line.startswith("headrace_weight_updates_total")]


async def by(fleet: AdministeredFleet, client: str, *steps: str) -> None:
    """These steps of an update, in the name of this client."""
    workers = fleet.administration.workers()
    for step in steps:
        if step == "start":
            await fleet.updating.start(workers, by=client)
        elif step == "receive":
            await fleet.updating.receive(workers, UPDATE, by=client)
        elif step == "finish":
            await fleet.updating.finish(workers, "8", by=client)
        else:
            await fleet.updating.label(workers, "8", by=client)


# --- shown and counted -------------------------------------------------------------------------------------------------------


async def test_an_update_by_steps_is_shown_and_counted_as_one_that_headrace_drives(autojump_clock):
    async with administered() as fleet:
        fleet.rig.metrics.watch(fleet.administration)
        await fleet.start()
        await trio.sleep(2)
        assert shown(fleet) == [("steps", "running", None, "me")]
        [told] = fleet.administration.describe_updates()
        assert (told["workers"], told["seconds"], told["silent"], told["ends_in"]) == (["w0", "w1"], 2.0, 2.0, 1798.0)
        await fleet.receive()
        await fleet.finish("8")
        assert fleet.administration.describe_updates() == []
        [one] = fleet.administration.updates.describe_all()
        assert one == fleet.administration.updates.describe(one["id"])
        done = {"status": "done", "reason": "", "seconds": 2.0}
        assert (one["status"], one["version"], one["seconds"], one["workers"]) == ("succeeded", "8", 2.0, {"w0": done, "w1": done})
        assert counted(fleet) == ['headrace_weight_updates_total{outcome="succeeded",transport="steps"} 1.0']
        assert 'headrace_weight_update_seconds_sum{transport="steps"} 2.0' in fleet.rig.metrics.text().decode()
        [entry] = [entry for entry in fleet.administration.journal.entries if entry.what == "update"]
        assert (entry.by, entry.detail["id"], entry.detail["outcome"]) == ("me", one["id"], "ok")


async def test_an_update_by_steps_that_failed_on_one_has_failed():
    async with administered() as fleet:
        fleet.rig.metrics.watch(fleet.administration)
        await fleet.start()
        fleet.engines[0].fails["update"] = [broken("shapes differ")]
        with pytest.raises(FleetFailed):
            await fleet.receive()
        assert shown(fleet) == [("steps", "running", None, "me")]
        await fleet.finish("8")
        [one] = fleet.administration.updates.describe_all()
        assert (one["status"], one["error"]) == ("failed", "w0: update_weights: shapes differ")
        assert [worker["status"] for worker in one["workers"].values()] == ["failed", "done"]
        assert counted(fleet) == ['headrace_weight_updates_total{outcome="failed",transport="steps"} 1.0']


async def test_an_update_ends_with_its_last_worker():
    async with administered() as fleet:
        await fleet.start()
        for engine in fleet.engines:
            engine.fails["update"] = [broken("shapes differ")]
        with pytest.raises(FleetFailed):
            await fleet.receive()
        assert shown(fleet) == [("steps", "failed", None, "me")]


async def test_a_start_that_failed_on_one_and_is_repeated_begins_no_other_update():
    async with administered() as fleet:
        fleet.engines[1].fails["start"] = [broken()]
        with pytest.raises(FleetFailed):
            await fleet.start()
        await fleet.update("8")
        assert shown(fleet) == [("steps", "succeeded", "8", "me")]


async def test_a_start_that_everybody_refuses_has_left_all_unchanged():
    async with administered() as fleet:
        for engine in fleet.engines:
            engine.fails["start"] = [refused()]
        with pytest.raises(FleetFailed):
            await fleet.start()
        [one] = fleet.administration.updates.describe_all()
        assert (one["status"], {worker["status"] for worker in one["workers"].values()}) == ("failed", {"unchanged"})


async def test_a_worker_that_was_replaced_has_failed_in_the_update():
    async with administered() as fleet:
        await fleet.start()
        restart(fleet, fleet.workers[1])
        with pytest.raises(FleetFailed):
            await fleet.receive()
        await fleet.finish("8")
        [one] = fleet.administration.updates.describe_all()
        assert "w1: update_weights: it was replaced by another process" in one["error"]


async def test_a_method_that_replaces_the_weights_is_shown_and_counted_too():
    async with administered() as fleet:
        fleet.rig.metrics.watch(fleet.administration)
        for worker in fleet.workers:
            serve_http(worker, {"results": [None]})
        await fleet.methods.call(fleet.workers, {"method": "reload_weights"}, by="me", version="8")
        await fleet.methods.call(fleet.workers, {"method": "get_rank"}, by="me")
        serve_http(fleet.workers[1], lambda _: httpx.Response(500, json={"error": "disk full"}))
        with pytest.raises(FleetFailed):
            await fleet.methods.call(fleet.workers, {"method": "reload_weights"}, by="me")
        assert shown(fleet) == [("reload_weights", "failed", None, "me"), ("reload_weights", "succeeded", "8", "me")]
        assert counted(fleet) == [
            f'headrace_weight_updates_total{{outcome="{outcome}",transport="reload_weights"}} 1.0' for outcome in ("succeeded", "failed")
        ]


async def test_updates_of_both_kinds_are_shown_in_the_order_of_their_beginning(autojump_clock):
    async with fleet_of() as fleet:
        await fleet.update("7")
        await trio.sleep(1)
        await fleet.administered.update("8")
        await trio.sleep(1)
        await fleet.update("9")
        assert [one[2] for one in shown(fleet.administered)] == ["9", "8", "7"]


async def test_a_new_headrace_knows_which_steps_the_one_before_has_not_seen_the_end_of(tmp_path):
    path = str(tmp_path / "journal.sqlite")
    async with administered(journal=path) as fleet:
        await fleet.update("7")
        await fleet.start()
    async with administered(journal=path) as fleet:
        cut, done = fleet.administration.updates.describe_all()
        assert (cut["status"], cut["transport"], cut["error"]) == ("failed", "steps", "headrace ended in the middle of it")
        assert (done["status"], done["version"]) == ("succeeded", "7")


# --- whose it is -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("received", [False, True])
async def test_who_has_lost_its_update_to_another_client_is_told_whose_the_workers_are_now(received):
    async with administered() as fleet:
        await by(fleet, "first", "start", *(["receive"] if received else []))
        await by(fleet, "second", "start")
        for step in ("receive", "finish", "label"):
            with pytest.raises(CallError, match=r"your weight update of .* has ended: second has started another one .*Start anew") as lost:
                await by(fleet, "first", step)
            assert lost.value.status == 409
        assert fleet.engines[0].asked.count("update") == 1 + received  # the abandoned one's end, and what came before it
        await by(fleet, "second", "receive", "finish")
        with pytest.raises(CallError, match="second has started another one"):
            await by(fleet, "first", "receive")
        assert fleet.states == ["ready", "ready"]
        assert shown(fleet) == [("steps", "succeeded", "8", "second"), ("steps", "failed", None, "first")]
        [noted] = [entry for entry in fleet.administration.journal.entries if "replaces" in entry.detail]
        assert (noted.what, noted.by, noted.detail["replaces"][0]["by"]) == ("start_weight_update", "second", "first")


async def test_two_clients_that_start_at_once_are_not_one():
    async with administered() as fleet, trio.open_nursery() as nursery:
        for client in ("first", "second"):
            nursery.start_soon(by, fleet, client, "start")
            await wait_all_tasks_blocked()
        await wait_all_tasks_blocked()
        with pytest.raises(CallError, match="second has started another one"):
            await by(fleet, "first", "receive")
        await by(fleet, "second", "receive", "finish")


async def test_a_trainer_that_was_started_again_starts_anew_and_goes_on():
    async with administered() as fleet:
        await by(fleet, "trainer", "start", "receive", "start", "receive", "finish", "label")
        assert fleet.states == ["ready", "ready"]
        assert shown(fleet) == [("steps", "succeeded", "8", "trainer"), ("steps", "failed", None, "trainer")]


async def test_who_has_lost_its_update_takes_it_back_by_a_start():
    async with administered() as fleet:
        await by(fleet, "first", "start")
        await by(fleet, "second", "start")
        await by(fleet, "first", "start", "receive", "finish")
        with pytest.raises(CallError, match="first has started another one"):
            await by(fleet, "second", "receive")


async def test_a_label_alone_belongs_to_nobody(autojump_clock):
    async with administered(lease=100.0) as fleet:
        await by(fleet, "somebody", "start")
        await trio.sleep(101)
        await by(fleet, "somebody", "label")
        assert [engine.version for engine in fleet.engines] == ["8", "8"]


async def test_another_process_of_the_trainer_may_take_the_steps_after_the_start():
    async with administered() as fleet:
        await by(fleet, "orchestrator", "start")
        await by(fleet, "rank 0", "receive")
        await by(fleet, "orchestrator", "finish")
        assert fleet.states == ["ready", "ready"]


async def test_a_start_that_everybody_refuses_takes_no_update_from_anybody():
    async with administered() as fleet:
        await by(fleet, "first", "start", "receive")
        for engine in fleet.engines:
            engine.fails["start"] = [refused()]
        with pytest.raises(FleetFailed, match="Nothing has changed"):
            await by(fleet, "second", "start")
        assert [one["by"] for one in fleet.administration.describe_updates()] == ["first"]


async def test_who_has_lost_its_update_to_one_in_one_request_is_told():
    async with fleet_of() as fleet:
        await by(fleet.administered, "first", "start", "receive")
        assert (await fleet.update("9", force=True)).failure is None
        with pytest.raises(CallError, match="me has started another one"):
            await by(fleet.administered, "first", "finish")


# --- how it ends when its trainer does nothing -------------------------------------------------------------------------------


async def test_a_step_that_waits_for_a_trainer_that_never_comes_ends_and_is_named(autojump_clock):
    async with administered(update_timeout=500.0, lease=100.0) as fleet:
        await fleet.start()
        fleet.engines[1].stalls["update"] = trio.Event()
        with pytest.raises(FleetFailed, match=r"w1: no answer within 500 s \(administration.update_timeout\)") as failed:
            await fleet.receive()
        assert (failed.value.status, trio.current_time()) == (504, 500.0)
        await fleet.finish("8")
        assert fleet.states == ["ready", "quarantined"]


async def test_an_update_in_one_request_that_waits_for_a_trainer_that_never_comes_ends(autojump_clock):
    async with fleet_of(repeatable=False, update_timeout=500.0) as fleet:
        fleet.courier.stalls = {"w0": trio.Event(), "w1": trio.Event()}
        update = await fleet.update("8")
        assert update.failure
        assert "w0: no answer within 500 s (administration.update_timeout); w1: " in update.failure.message
        assert (fleet.states, trio.current_time()) == (["quarantined", "quarantined"], 500.0)


async def test_who_joins_a_group_in_which_the_trainer_never_comes_is_not_waited_for_for_ever(autojump_clock):
    async with administered(update_timeout=500.0) as fleet:
        fleet.engines[0].stalls["init"] = trio.Event()
        with pytest.raises(FleetFailed, match="w0: no answer within 500 s"):
            await fleet.joining.join(fleet.workers, lambda cohort, index: {}, by="me")
        assert fleet.states == ["ready", "ready"]


async def test_an_update_whose_trainer_was_silent_has_failed_and_it_has_to_start_anew(autojump_clock):
    async with administered(lease=100.0) as fleet:
        await by(fleet, "first", "start", "receive")
        await trio.sleep(101)
        [one] = fleet.administration.updates.describe_all()
        assert (one["status"], one["seconds"]) == ("failed", 100.0)
        assert "its trainer was silent for 100 s" in one["error"]
        await by(fleet, "second", "start")
        with pytest.raises(CallError, match="has ended: its trainer was silent for 100 s"):
            await by(fleet, "first", "receive")


async def test_an_update_by_steps_is_given_up_between_two_of_them():
    async with administered() as fleet:
        routes = Routes(max_body_bytes=10_000)
        add_update_routes(routes, fleet.administration)
        await by(fleet, "trainer", "start", "receive")
        [one] = fleet.administration.describe_updates()
        browser = await ask(routes, "DELETE", f"/fleet/updates/{one['id']}")
        assert (browser.status, browser.json["status"]) == (202, "failed")
        assert [(worker.state, worker.reason) for worker in fleet.workers] == [("quarantined", "given up by 127.0.0.1")] * 2
        browser = await ask(routes, "DELETE", f"/fleet/updates/{one['id']}")
        over = f"update {one['id']}: it is over, and has failed: w0: given up by 127.0.0.1; w1: given up by 127.0.0.1"
        assert (browser.status, browser.json["error"]["message"]) == (409, over)
        with pytest.raises(CallError, match=r"has ended: given up by 127\.0\.0\.1"):
            await by(fleet, "trainer", "finish")
        await fleet.update("9")
        assert fleet.states == ["ready", "ready"]


async def test_an_update_by_steps_is_given_up_in_the_middle_of_one():
    async with administered() as fleet, trio.open_nursery() as nursery:
        failures: list[FleetFailed] = []

        async def receive() -> None:
            with pytest.raises(FleetFailed) as failed:
                await fleet.receive()
            failures.append(failed.value)

        await fleet.start()
        fleet.engines[1].stalls["update"] = trio.Event()
        nursery.start_soon(receive)
        await wait_all_tasks_blocked()
        [one] = fleet.administration.describe_updates()
        assert (one["silent"], one["ends_in"]) == (None, None)
        await fleet.administration.give_up(one["id"], by="somebody")
        assert [failure.message for failure in failures] == [
            "update_weights failed on w1: given up by somebody. Quarantined; the other workers go on"
        ]
        assert fleet.states == ["quarantined", "quarantined"]


# --- what one that broke off has left ----------------------------------------------------------------------------------------


async def test_what_an_update_that_broke_off_has_left_is_cleared_away_before_the_next_one():
    async with administered() as fleet:
        await fleet.start()
        fleet.engines[0].fails["update"] = [broken("shapes differ")]
        with pytest.raises(FleetFailed):
            await fleet.receive()
        await fleet.finish("8")
        for engine in fleet.engines:
            engine.asked.clear()
        await fleet.update("9")
        whole = ["start", "update", "finish"]
        assert [engine.asked for engine in fleet.engines] == [["start", "finish", *whole, "resume"], ["pause", *whole, "resume"]]
        for engine in fleet.engines:
            engine.asked.clear()
        await fleet.update("10")
        assert [engine.asked for engine in fleet.engines] == [["pause", *whole, "resume"]] * 2


async def test_it_is_cleared_away_by_a_new_headrace_too(tmp_path):
    path = str(tmp_path / "journal.sqlite")
    async with administered(journal=path) as fleet:
        await fleet.update("7")
        await fleet.start()
    async with administered(journal=path) as fleet:
        for worker, engine in zip(fleet.workers, fleet.engines, strict=True):
            engine.paused = engine.updating = True
            fleet.rig.move(worker, "gone")
            fleet.rig.move(worker, "paused")
        assert fleet.states == ["quarantined", "quarantined"]
        await fleet.update("8")
        assert fleet.engines[0].asked[1:7] == ["update", "start", "finish", "start", "update", "finish"]


@pytest.mark.parametrize("how", ["method", "steps"])
async def test_what_a_load_that_broke_off_has_left_is_cleared_away_before_the_next_one(how):
    async with administered(1) as fleet:
        reload = partial(fleet.methods.call, fleet.workers, {"method": "reload_weights"}, by="me")
        if how == "steps":
            await fleet.start()
            fleet.engines[0].fails["update"] = [broken("shapes differ")]
            with pytest.raises(FleetFailed):
                await fleet.receive()
        else:
            serve_http(fleet.workers[0], lambda _: httpx.Response(500, json={"error": "no space"}))
            with pytest.raises(FleetFailed):
                await reload()
        asked = serve_http(fleet.workers[0], {"results": [None]})
        fleet.engines[0].broken = False  # it only knows of steps
        for _ in range(2):
            await reload()
        assert asked == [
            {"method": "reload_weights", "kwargs": {"weights_iterator": []}},
            {"method": "reload_weights"},
            {"method": "reload_weights"},
        ]


async def test_a_method_that_no_engine_has_leaves_nothing_to_clear_away():
    async with administered(1) as fleet:
        serve_http(fleet.workers[0], lambda _: httpx.Response(500, json={"error": "'Worker' object has no attribute 'reload_weights'"}))
        reload = partial(fleet.methods.call, fleet.workers, {"method": "reload_weights"}, by="me")
        with pytest.raises(FleetFailed, match="Nothing has changed"):
            await reload()
        asked = serve_http(fleet.workers[0], {"results": [None]})
        await reload()
        assert asked == [{"method": "reload_weights"}]


async def test_a_transport_clears_away_what_steps_have_left_and_the_other_way_round():
    async with fleet_of(1) as fleet:
        await fleet.administered.start()
        await fleet.update("8", force=True)
        await fleet.update("9")
        assert [told.torn for told in fleet.courier.told] == [{"w0"}, frozenset()]
        fleet.engines[0].fails["update"] = [broken("no space")]
        await fleet.update("10")
        fleet.engines[0].asked.clear()
        await fleet.administered.update("11")
        assert fleet.engines[0].asked[-6:] == ["start", "finish", "start", "update", "finish", "resume"]
