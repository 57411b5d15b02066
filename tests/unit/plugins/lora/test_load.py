"""Loading over a fleet: everywhere or nowhere, once, one after the other, and whoever asks may go."""

import json
import os

import pytest
import trio
from grpclib.const import Status
from trio.testing import wait_all_tasks_blocked

from core.wire import ConnectionLost
from tests.unit.plugins.lora.fleet import lora_fleet, message, refused


async def test_an_adapter_is_loaded_on_every_worker(fleet):
    path = fleet.adapter("one")
    response = await fleet.load("math", path)
    assert (response.status_code, response.text) == (200, "Success: LoRA adapter 'math' added successfully.")
    assert response.headers["content-type"].startswith("text/plain")
    assert [control.held for control in fleet.controls.values()] == [{"math": path}] * 2
    assert await fleet.adapters() == {
        "math": {"lora_name": "math", "lora_path": path, "base_model": "tiny", "on_workers": "math", "workers": ["w0", "w1"], "calls": 0}
    }


async def test_workers_are_asked_at_once(fleet):
    gates = [trio.Event(), trio.Event()]
    for control, gate in zip(fleet.controls.values(), gates, strict=True):
        control.stalls["load"] = gate
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fleet.load, "math", fleet.adapter("one"))
        while not all(control.asked for control in fleet.controls.values()):
            await trio.testing.wait_all_tasks_blocked(0.01)
        assert await fleet.adapters() == {}
        for gate in gates:
            gate.set()
    assert list(await fleet.adapters()) == ["math"]


async def test_the_same_source_is_loaded_once(fleet):
    path = fleet.adapter("one")
    for _ in range(3):
        assert (await fleet.load("math", path)).status_code == 200
    assert (await fleet.load("math", path, load_inplace=True)).status_code == 200
    assert [control.asked for control in fleet.controls.values()] == [[("load", "math")]] * 2


async def test_another_source_is_refused_unless_it_replaces_the_first(fleet):
    await fleet.load("math", fleet.adapter("one"))
    response = await fleet.load("math", fleet.adapter("two"))
    assert response.status_code == 400
    assert message(response).startswith("LoRA adapter `math` is already loaded.")
    assert response.json()["error"]["param"] == "lora_name"
    assert (await fleet.load("math", fleet.adapter("two"), load_inplace=True)).status_code == 200
    await wait_all_tasks_blocked()
    assert fleet.held == [["math@1"], ["math@1"]]


async def test_a_folder_that_was_written_anew_is_another_source(fleet):
    await fleet.load("math", fleet.adapter("one"))
    path = fleet.adapter("one", "other weights")
    os.utime(f"{path}/adapter_model.safetensors", ns=(1, 1))
    assert (await fleet.load("math", path)).status_code == 400
    assert (await fleet.load("math", path, load_inplace=True)).status_code == 200
    await wait_all_tasks_blocked()
    assert fleet.held == [["math@1"], ["math@1"]]


async def test_where_the_files_are_not_seen_load_inplace_is_taken_at_its_word(tmp_path):
    async with lora_fleet(tmp_path, shared_files=False) as fleet:
        path = str(tmp_path / "only-the-workers-see-it")
        for in_place in (False, False, True):
            assert (await fleet.load("math", path, load_inplace=in_place)).status_code == 200
        await wait_all_tasks_blocked()
        assert fleet.held == [["math@1"], ["math@1"]]


async def test_what_one_worker_refuses_no_worker_keeps(fleet):
    await fleet.load("math", fleet.adapter("one"))
    fleet.controls["w1"].failures["load"] = [refused("out of memory")]
    response = await fleet.load("math", fleet.adapter("two"), load_inplace=True)
    assert response.status_code == 500
    assert message(response) == "LoRA adapter `math` was not loaded: w1: out of memory. No worker uses it"
    assert fleet.held == [["math"], ["math"]]
    assert (await fleet.adapters())["math"]["lora_path"].endswith("one")
    assert (await fleet.load("math", fleet.adapter("two"), load_inplace=True)).status_code == 200
    await wait_all_tasks_blocked()
    assert fleet.held == [["math@2"], ["math@2"]]


async def test_a_worker_that_refused_for_certain_is_not_asked_to_unload(fleet):
    fleet.controls["w1"].failures["load"] = [refused("r must be at most 8", Status.INVALID_ARGUMENT)]
    assert (await fleet.load("math", fleet.adapter("one"))).status_code == 400
    assert fleet.controls["w0"].asked == [("load", "math"), ("unload", "math")]
    assert fleet.controls["w1"].asked == [("load", "math")]


@pytest.mark.parametrize(
    ("failures", "status"),
    [
        ([refused("Local LoRA adapter path must exist and be accessible.", Status.INVALID_ARGUMENT)], 404),
        ([refused("bad", Status.INVALID_ARGUMENT), refused("bad", Status.INVALID_ARGUMENT)], 400),
        ([refused("the path must exist", Status.INVALID_ARGUMENT), refused("bad", Status.INVALID_ARGUMENT)], 500),
        ([refused("LoRA is off", Status.FAILED_PRECONDITION)], 400),
        ([ConnectionLost("reset", sent=True)], 500),
    ],
)
async def test_the_status_says_whether_to_try_again(fleet, failures, status):
    for control, failure in zip(fleet.controls.values(), failures, strict=False):
        control.failures["load"] = [failure]
    assert (await fleet.load("math", fleet.adapter("one"))).status_code == status
    assert fleet.held == [[], []]


async def test_a_lost_worker_is_probed_at_once(fleet):
    fleet.controls["w1"].failures["load"] = [ConnectionLost("reset", sent=True)]
    await fleet.load("math", fleet.adapter("one"))
    with trio.fail_after(1):
        await fleet.workers["w1"].suspected()


@pytest.mark.parametrize("failures", [[ConnectionLost("reset", sent=True)], []])
async def test_a_worker_that_dies_in_the_middle_does_not_hold_up_the_others(fleet, failures):
    gate = fleet.controls["w1"].stalls["load"] = trio.Event()
    fleet.controls["w1"].failures["load"] = failures
    path = fleet.adapter("one")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fleet.load, "math", path)
        while not fleet.controls["w1"].asked:
            await wait_all_tasks_blocked(0.01)
        fleet.move("w1", "gone")
        gate.set()
    assert (await fleet.adapters())["math"]["workers"] == ["w0"]


async def test_a_worker_that_does_not_answer_fails_the_load_after_the_deadline(tmp_path, autojump_clock):
    async with lora_fleet(tmp_path, deadline=5.0) as fleet:
        path = fleet.adapter("one")
        gate = fleet.controls["w1"].stalls["load"] = trio.Event()
        response = await fleet.load("math", path)
        assert response.status_code == 500
        assert "w1: no answer within 5 s (plugins.lora.deadline)" in message(response)
        assert fleet.held == [[], []]
        assert fleet.controls["w1"].asked == [("load", "math"), ("unload", "math")]
        gate.set()


async def test_loads_of_one_name_come_one_after_the_other_and_of_others_at_once(tmp_path):
    async with lora_fleet(tmp_path, hub=True) as fleet:
        gate = fleet.controls["w0"].stalls["load"] = trio.Event()
        async with trio.open_nursery() as nursery:
            for name, path in (("math", "org/one"), ("math", "org/one"), ("code", "org/two")):
                nursery.start_soon(fleet.load, name, path)
            await wait_all_tasks_blocked(0.01)
            assert sorted(fleet.controls["w0"].asked) == [("load", "code"), ("load", "math")]
            gate.set()
        assert fleet.held == [["code", "math"]] * 2  # the second one joined the first


async def test_a_load_goes_on_when_its_client_has_gone(fleet):
    path = fleet.adapter("one")
    gate = fleet.controls["w0"].stalls["load"] = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fleet.load, "math", path)
        while not fleet.controls["w0"].asked:
            await wait_all_tasks_blocked(0.01)
        nursery.cancel_scope.cancel()
    gate.set()
    await wait_all_tasks_blocked()
    assert fleet.held == [["math"], ["math"]]
    assert list(await fleet.adapters()) == ["math"]


async def test_a_failed_load_is_undone_when_its_client_has_gone(fleet):
    path = fleet.adapter("one")
    gate = fleet.controls["w0"].stalls["load"] = trio.Event()
    fleet.controls["w0"].failures["load"] = [refused()]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fleet.load, "math", path)
        while not fleet.controls["w0"].asked:
            await wait_all_tasks_blocked(0.01)
        nursery.cancel_scope.cancel()
    gate.set()
    await wait_all_tasks_blocked()
    assert fleet.held == [[], []]


async def test_an_adapter_of_that_name_and_path_on_a_worker_is_as_good(fleet):
    path = fleet.adapter("one")
    fleet.controls["w1"].held["math"] = path
    assert (await fleet.load("math", path)).status_code == 200


async def test_another_adapter_of_that_name_on_a_worker_fails_the_load_and_the_next_one_avoids_it(fleet):
    path = fleet.adapter("one")
    fleet.controls["w1"].held["math"] = "/elsewhere"
    response = await fleet.load("math", path)
    assert response.status_code == 500
    assert "w1: LoRA adapter `math` is already loaded" in message(response)
    assert fleet.controls["w1"].held == {"math": "/elsewhere"}
    assert (await fleet.load("math", path)).status_code == 200
    assert (await fleet.adapters())["math"]["on_workers"] == "math@1"


async def test_a_worker_that_takes_no_adapters_is_left_out(fleet):
    await fleet.join("plain", lora=False)
    assert (await fleet.load("math", fleet.adapter("one"))).status_code == 200
    assert fleet.controls["plain"].asked == []


async def test_without_a_worker_that_takes_adapters_there_is_nowhere_to_load(tmp_path):
    async with lora_fleet(tmp_path, count=0) as fleet:
        await fleet.join("plain", lora=False)
        body = {"lora_name": "math", "lora_path": fleet.adapter("one")}
        assert (await fleet.post("/v1/load_lora_adapter", **body)).status_code == 503
        assert (await fleet.post("/load_lora_adapter", **body)).status_code == 500  # Prime-RL tries again after this one only


async def test_in_a_fleet_of_two_models_the_adapter_says_whose_it_is(fleet):
    await fleet.join("big", models=("big",))
    path = fleet.adapter("one")
    response = await fleet.load("math", path)
    assert (response.status_code, message(response)) == (400, "base_model: the fleet serves big, tiny; name one")
    assert (await fleet.load("math", path, base_model="nope")).status_code == 404
    assert (await fleet.load("math", path, base_model="big")).status_code == 200
    assert fleet.held == [[], [], ["math"]]
    response = await fleet.generate(model="math")
    assert (response.headers["x-headrace-worker"], response.json()["model"]) == ("big", "math")


async def test_prime_rl_gets_its_json_and_needs_no_flag(fleet):
    for name in ("step_1", "step_2"):
        response = await fleet.post("/load_lora_adapter", lora_name="r8-a16", lora_path=fleet.adapter(name))
        assert (response.status_code, response.json()) == (200, {"status": "ok"})
    assert (await fleet.adapters())["r8-a16"]["lora_path"].endswith("step_2")


async def test_prime_rl_gets_a_404_until_the_files_are_there(fleet):
    body = {"lora_name": "r8-a16", "lora_path": str(fleet.folder / "step_3")}
    assert (await fleet.post("/load_lora_adapter", **body)).status_code == 404
    (fleet.folder / "step_3").mkdir()
    assert (await fleet.post("/load_lora_adapter", **body)).status_code == 404
    fleet.adapter("step_3")
    assert (await fleet.post("/load_lora_adapter", **body)).status_code == 200


@pytest.mark.parametrize(
    ("body", "text", "param"),
    [
        (b"", "the body is not JSON", None),
        (b"[]", "Expected `object`", None),
        (b'{"lora_name": "math"}', "lora_path: this field is required", "lora_path"),
        (b'{"lora_name": 7, "lora_path": "/x"}', "lora_name: Expected `str`, got `int`", "lora_name"),
        (b'{"lora_name": "math", "lora_path": "/x", "inplace": true}', "did you mean 'load_inplace'?", "inplace"),
        (b"[" * 5000, "Expected `object`", None),
    ],
)
async def test_a_body_that_is_none_is_refused_by_name(fleet, body, text, param):
    for path in ("/v1/load_lora_adapter", "/load_lora_adapter"):
        response = await fleet.client.post(path, content=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
        assert text in message(response)


NASTY_TEXTS = ["", " ", "\0", "a\nb", "x" * 5000, "../..", "/", "//", "/\ud7ff", "/" + "x" * 5000, "math@1", "tiny@0"]
NASTY = [*NASTY_TEXTS, None, 7, 1e400, [], {}, True]


@pytest.mark.parametrize("field", ["lora_name", "lora_path", "load_inplace", "is_3d_lora_weight", "base_model"])
async def test_no_value_of_any_field_is_our_fault(fleet, field):
    for value in NASTY:
        body = {"lora_name": "math", "lora_path": fleet.adapter("one"), field: value}
        content = json.dumps(body).encode()
        for path in ("/v1/load_lora_adapter", "/load_lora_adapter"):
            assert (await fleet.client.post(path, content=content)).status_code in (200, 400, 404), value


async def test_a_fault_of_ours_in_a_load_is_undone_like_any_failure(fleet):
    fleet.controls["w1"].failures["load"] = [ArithmeticError("a fault of ours")]
    assert (await fleet.load("math", fleet.adapter("one"))).status_code == 500
    assert fleet.held == [[], []]
    assert (await fleet.load("math", fleet.adapter("one"))).status_code == 200
