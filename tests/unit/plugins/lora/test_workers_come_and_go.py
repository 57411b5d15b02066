"""Workers that join, leave and were there before: each has every adapter before its first call."""

import pytest
import trio
from grpclib.const import Status
from trio.testing import wait_all_tasks_blocked

from core.errors import PluginFault
from tests.unit.core.rig import make_call
from tests.unit.plugins.lora.fleet import Control, lora_fleet, message, refused


async def test_a_worker_that_joins_later_gets_every_adapter_first(fleet):
    await fleet.load("math", fleet.adapter("one"))
    await fleet.load("code", fleet.adapter("two"))
    await fleet.load("tiny", fleet.adapter("one"))
    await fleet.join("late")
    assert fleet.held[2] == ["code", "math", "tiny@1"]
    assert (await fleet.adapters())["math"]["workers"] == ["late", "w0", "w1"]


async def test_a_worker_that_cant_load_one_stays_out(fleet):
    await fleet.load("math", fleet.adapter("one"))
    control = Control()
    control.failures["load"] = [refused("no such file")]
    with pytest.raises(PluginFault) as fault:
        await fleet.join("late", control=control)
    assert str(fault.value.__cause__) == "no such file"
    await fleet.proxy.registry.prepare(fleet.workers["late"])  # the next probe
    assert fleet.held[2] == ["math"]


async def test_a_worker_that_does_not_answer_stays_out(tmp_path, autojump_clock):
    async with lora_fleet(tmp_path, deadline=3.0) as fleet:
        control = Control()
        control.stalls["list"] = trio.Event()
        with pytest.raises(PluginFault) as fault:
            await fleet.join("late", control=control)
        assert str(fault.value.__cause__) == "no answer within 3 s (plugins.lora.deadline)"


async def test_a_worker_that_came_back_empty_gets_them_again(fleet):
    await fleet.load("math", fleet.adapter("one"))
    fleet.move("w1", "gone")
    assert (await fleet.adapters())["math"]["workers"] == ["w0"]
    fleet.controls["w1"].held.clear()
    await fleet.proxy.registry.prepare(fleet.workers["w1"])
    fleet.move("w1", "ready")
    assert fleet.held == [["math"], ["math"]]
    assert (await fleet.adapters())["math"]["workers"] == ["w0", "w1"]


async def test_what_was_unloaded_and_replaced_meanwhile_is_unloaded_from_a_worker_that_comes_back(fleet):
    for name in ("math", "code"):
        await fleet.load(name, fleet.adapter(name))
    fleet.move("w1", "gone")
    await fleet.load("math", fleet.adapter("other"), load_inplace=True)
    await fleet.unload("code")
    assert fleet.held[1] == ["code", "math"]
    await fleet.proxy.registry.prepare(fleet.workers["w1"])
    assert fleet.held[1] == ["math@1"]


async def test_an_old_version_that_a_worker_cant_unload_keeps_it_not_out(fleet):
    for name in ("one", "two"):
        await fleet.load("math", fleet.adapter(name), load_inplace=True)
    control = Control()
    control.held = {"math": "/old"}
    control.failures["unload"] = [refused("busy")]
    await fleet.join("late", control=control)
    assert fleet.held[2] == ["math", "math@1"]


async def test_an_adapter_that_becomes_current_while_a_worker_is_prepared_is_on_it(fleet):
    await fleet.load("math", fleet.adapter("one"))
    control = Control()
    gate = control.stalls["load"] = trio.Event()
    path = fleet.adapter("two")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: fleet.join("late", control=control))
        while not control.asked:
            await wait_all_tasks_blocked(0.01)
        nursery.start_soon(lambda: fleet.load("math", path, load_inplace=True))
        nursery.start_soon(fleet.load, "code", path)
        while len(control.asked) < 2:
            await wait_all_tasks_blocked(0.01)
        gate.set()
    await wait_all_tasks_blocked(0.01)
    assert fleet.held[2] == ["code", "math@1"]
    assert (await fleet.adapters())["math"]["workers"] == ["late", "w0", "w1"]


@pytest.mark.parametrize("before", [True, False])
async def test_a_worker_that_joins_while_the_others_load_is_loaded_too(fleet, before):
    control = Control()
    if before:  # it holds the version that is current
        await fleet.load("math", fleet.adapter("one"))
        control.held = {"math": fleet.folder.joinpath("one").as_posix()}
    gate = fleet.controls["w0"].stalls["load"] = trio.Event()
    path = fleet.adapter("two")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: fleet.load("math", path, load_inplace=True))
        while len(fleet.controls["w0"].asked) < 1 + before:
            await wait_all_tasks_blocked(0.01)
        await fleet.join("late", control=control)
        gate.set()
    await wait_all_tasks_blocked(0.01)
    assert fleet.held == [["math@1" if before else "math"]] * 3
    assert (await fleet.adapters())["math"]["workers"] == ["late", "w0", "w1"]


async def test_a_worker_that_joins_during_a_load_does_not_get_the_version_before(fleet):
    await fleet.load("math", fleet.adapter("one"))
    gate = fleet.controls["w0"].stalls["load"] = trio.Event()
    path = fleet.adapter("two")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: fleet.load("math", path, load_inplace=True))
        while len(fleet.controls["w0"].asked) < 2:
            await wait_all_tasks_blocked(0.01)
        nursery.start_soon(fleet.join, "late")
        await wait_all_tasks_blocked(0.01)
        gate.set()
    assert fleet.controls["late"].asked == [("load", "math@1")]


async def test_a_worker_that_was_emptied_before_it_joined_is_prepared_again(fleet):
    await fleet.load("math", fleet.adapter("one"))
    worker = fleet.add("late")
    for _ in range(2):  # some other plugin isn't done with it yet
        await fleet.proxy.registry.prepare(worker)
        assert fleet.held[2] == ["math"]
        fleet.controls["late"].held.clear()


async def test_a_version_that_only_calls_in_flight_use_is_not_learnt_from_a_worker_that_comes_back(fleet):
    await fleet.load("math", fleet.adapter("one"))
    call = make_call(model="math")
    fleet.plugin.receive_call(call)
    await fleet.load("math", fleet.adapter("two"), load_inplace=True)
    fleet.move("w1", "gone")
    await fleet.proxy.registry.prepare(fleet.workers["w1"])
    assert fleet.held == [["math", "math@1"], ["math@1"]]
    fleet.plugin.call_settled(call)
    await wait_all_tasks_blocked(0.01)
    assert fleet.held == [["math@1"]] * 2


async def test_a_restarted_proxy_goes_on_with_what_the_workers_hold(tmp_path):
    controls = [Control(), Control()]
    for control in controls:
        control.held = {"math@3": str(tmp_path / "one"), "tiny@2": str(tmp_path / "two"), "code": "org/code"}
    async with lora_fleet(tmp_path, count=0) as fleet:
        for number, control in enumerate(controls):
            await fleet.join(f"w{number}", control=control)
        assert [control.asked for control in controls] == [[], []]
        adapters = await fleet.adapters()
        assert {name: entry["on_workers"] for name, entry in adapters.items()} == {"code": "code", "math": "math@3", "tiny": "tiny@2"}
        assert all(entry["workers"] == ["w0", "w1"] for entry in adapters.values())
        assert (await fleet.generate(model="math")).headers["x-headrace-adapter"] == "math@3"
        assert (await fleet.generate(model="tiny")).headers["x-headrace-adapter"] == "tiny@2"
        # Nobody knows whether the files are still those that were loaded.
        path = fleet.adapter("one")
        assert (await fleet.load("math", path)).status_code == 200
        assert fleet.held == [["code", "math@3", "tiny@2"]] * 2
        assert (await fleet.load("math", path, load_inplace=True)).status_code == 200
        await wait_all_tasks_blocked(0.01)
        assert fleet.held == [["code", "math@4", "tiny@2"]] * 2


async def test_a_load_that_a_proxy_left_half_done_is_decided_by_the_first_worker(tmp_path):
    half, other = Control(), Control()
    half.held = {"math": "/old", "math@1": "/new"}
    other.held = {"math": "/old"}
    async with lora_fleet(tmp_path, count=0) as fleet:
        await fleet.join("w0", control=half)
        await fleet.join("w1", control=other)
        assert [half.held, other.held] == [{"math@1": "/new"}] * 2


async def test_a_version_found_on_a_later_worker_does_not_replace_the_one_in_use(tmp_path):
    newer = Control()
    newer.held = {"math@7": "/new"}
    async with lora_fleet(tmp_path, count=1) as fleet:
        await fleet.load("math", fleet.adapter("one"))
        await fleet.join("w1", control=newer)
        assert fleet.held == [["math"], ["math"]]


async def test_a_failing_worker_that_does_not_take_part_fails_no_load(fleet):
    await fleet.join("ill")
    fleet.move("ill", "quarantined")
    fleet.controls["ill"].failures["load"] = [refused()]
    path = fleet.adapter("one")
    assert (await fleet.load("math", path)).status_code == 200
    fleet.move("ill", "ready")
    assert {(await fleet.generate(model="math")).headers["x-headrace-worker"] for _ in range(6)} == {"w0", "w1"}
    assert (await fleet.load("math", path)).status_code == 200  # the same again loads it where it lacks
    assert (await fleet.adapters())["math"]["workers"] == ["ill", "w0", "w1"]


async def test_paused_workers_take_part(fleet):
    fleet.move("w0", "paused")
    assert (await fleet.load("math", fleet.adapter("one"))).status_code == 200
    assert fleet.held == [["math"], ["math"]]


async def test_unload_says_who_has_not_and_the_next_operation_tries_again(fleet):
    await fleet.load("math", fleet.adapter("one"))
    fleet.controls["w1"].failures["unload"] = [refused("busy")]
    response = await fleet.unload("math")
    assert response.status_code == 500
    assert message(response) == "LoRA adapter `math` is out of use, but not yet unloaded by w1; that is tried again later"
    assert (await fleet.generate(model="math")).status_code == 404
    assert fleet.held == [[], ["math"]]
    await fleet.load("code", fleet.adapter("two"))
    await wait_all_tasks_blocked(0.01)
    assert fleet.held == [["code"], ["code"]]


async def test_an_adapter_is_never_loaded_twice_under_one_name_on_the_workers(fleet):
    path = fleet.adapter("one")
    for number in range(3):
        assert (await fleet.load("math", path)).status_code == 200
        assert fleet.held == [["math" if number == 0 else f"math@{number}"]] * 2
        assert (await fleet.unload("math")).status_code == 200


async def test_what_a_worker_has_unloaded_by_itself_is_unloaded(fleet):
    await fleet.load("math", fleet.adapter("one"))
    fleet.controls["w1"].held.clear()
    assert (await fleet.unload("math")).status_code == 200


async def test_an_unknown_adapter_cant_be_unloaded(fleet):
    response = await fleet.unload("nope")
    assert (response.status_code, message(response)) == (404, "The model `nope` does not exist.")
    response = await fleet.post("/v1/unload_lora_adapter", lora_name="nope", lora_int_id=3)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "lora_int_id")


async def test_an_unload_goes_on_when_its_client_has_gone(fleet):
    await fleet.load("math", fleet.adapter("one"))
    gate = fleet.controls["w1"].stalls["unload"] = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fleet.unload, "math")
        while ("unload", "math") not in fleet.controls["w1"].asked:
            await wait_all_tasks_blocked(0.01)
        nursery.cancel_scope.cancel()
    gate.set()
    await wait_all_tasks_blocked(0.01)
    assert fleet.held == [[], []]


async def test_a_failure_that_nobody_expected_ends_no_later_operation(fleet):
    await fleet.load("math", fleet.adapter("one"))
    fleet.controls["w1"].failures["unload"] = [ArithmeticError("a fault of ours")]
    assert (await fleet.load("math", fleet.adapter("two"), load_inplace=True)).status_code == 200
    await wait_all_tasks_blocked(0.01)
    assert (await fleet.load("code", fleet.adapter("two"))).status_code == 200
    await wait_all_tasks_blocked(0.01)
    assert fleet.held == [["code", "math@1"]] * 2


async def test_nothing_is_kept_of_what_is_gone(fleet):
    for number in range(5):
        await fleet.load("math", fleet.adapter(f"step_{number}"), load_inplace=True)
    await fleet.unload("math")
    await wait_all_tasks_blocked(0.01)
    adapters = fleet.plugin._adapters
    assert (adapters.versions.all, adapters.versions.current, adapters._locks) == ({}, {}, {})


async def test_a_refused_precondition_says_what_the_worker_said(fleet):
    for control in fleet.controls.values():
        control.failures["load"] = [refused("LoRA is not enabled", Status.FAILED_PRECONDITION)]
    response = await fleet.load("math", fleet.adapter("one"))
    assert (response.status_code, message(response)) == (
        400,
        "LoRA adapter `math` was not loaded: w0: LoRA is not enabled; w1: LoRA is not enabled. No worker uses it",
    )
