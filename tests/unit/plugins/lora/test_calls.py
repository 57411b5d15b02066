"""Calls that name an adapter: which version they get, on which worker, and how long it stays."""

import msgspec
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from core import OVER_GRPC, Call, hookimpl
from core.northbound.relay import parse_relayed
from core.wire.generated.inference_pb2 import GenerateRequest
from plugins.lora import Lora, Settings
from tests.unit.core.lanes import output
from tests.unit.core.rig import make_call
from tests.unit.plugins.lora.fleet import lora_fleet, message


def sent(fleet) -> list[GenerateRequest]:
    """What all workers got."""
    return [request for lane in fleet.lanes.values() for request in lane.requests]


@pytest.mark.parametrize(
    "fields", [{"model": "math"}, {"lora_name": "math"}, {"model": "tiny", "lora_name": "math"}, {"model": "math", "lora_name": "math"}]
)
async def test_an_adapter_is_named_by_model_or_by_lora_name(fleet, fields):
    await fleet.load("math", fleet.adapter("one"))
    response = await fleet.generate(**fields)
    assert response.status_code == 200
    assert (response.json()["model"], response.headers["x-headrace-adapter"]) == ("math", "math")
    [request] = sent(fleet)
    assert (request.model, request.lora_name) == ("tiny", "math")


@pytest.mark.parametrize("fields", [{}, {"model": "tiny"}, {"lora_name": None}, {"lora_name": ""}])
async def test_other_calls_get_the_model_itself(fleet, fields):
    await fleet.load("math", fleet.adapter("one"))
    response = await fleet.generate(**fields)
    assert (response.json()["model"], sent(fleet)[0].lora_name) == ("tiny", "")
    assert "x-headrace-adapter" not in response.headers


async def test_unknown_names_are_not_found(fleet):
    response = await fleet.generate(model="nope")
    assert (response.status_code, message(response)) == (404, "The model `nope` does not exist. The fleet serves tiny.")
    response = await fleet.generate(lora_name="nope")
    assert (response.status_code, message(response)) == (404, "LoRA adapter `nope` is not loaded")
    await fleet.load("math", fleet.adapter("one"))
    assert (await fleet.generate(model="nope", lora_name="math")).status_code == 404


async def test_a_name_on_the_workers_is_not_a_name_for_clients(fleet):
    for name in ("one", "two"):
        await fleet.load("math", fleet.adapter(name), load_inplace=True)
    assert (await fleet.generate(model="math@1")).status_code == 404


async def test_two_adapters_in_one_call_are_refused(fleet):
    for name in ("math", "code"):
        await fleet.load(name, fleet.adapter(name))
    response = await fleet.generate(model="math", lora_name="code")
    assert (response.status_code, message(response)) == (400, "lora_name: model says 'math' and lora_name says 'code'; send one")


@pytest.mark.parametrize("value", [7, ["math"], {"name": "math"}, True])
async def test_a_lora_name_that_is_no_text_is_refused(fleet, value):
    response = await fleet.generate(lora_name=value)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "lora_name")


async def test_a_lora_name_that_is_no_utf_8_is_refused(fleet):
    response = await fleet.client.post("/inference/v1/generate", content=b'{"token_ids":[1],"sampling_params":{},"lora_name":"\xff"}')
    assert (response.status_code, response.json()["error"]["param"]) == (400, "lora_name")


async def test_the_identity_has_the_version(tmp_path):
    identities = []

    class Watcher:
        @hookimpl
        def eligible_workers(self, call: Call) -> None:
            identities.append(call.identity.adapter)

    async with lora_fleet(tmp_path, plugins={"watcher": Watcher()}) as fleet:
        for name in ("one", "two"):
            await fleet.load("math", fleet.adapter(name), load_inplace=True)
            await fleet.generate(model="math", cache_salt="7")
    assert identities == ["math", "math@1"]  # so neither an engine nor a router takes one version's blocks for the other's
    assert {request.kv.cache_salt for request in sent(fleet)} == {"7"}


async def test_calls_go_only_where_the_adapter_is(fleet):
    await fleet.join("plain", lora=False)
    await fleet.load("math", fleet.adapter("one"))
    assert {(await fleet.generate(model="math")).headers["x-headrace-worker"] for _ in range(6)} == {"w0", "w1"}
    assert {(await fleet.generate()).headers["x-headrace-worker"] for _ in range(6)} == {"w0", "w1", "plain"}
    fleet.move("w0", "gone")
    fleet.move("w1", "gone")
    response = await fleet.generate(model="math")
    assert (response.status_code, message(response)) == (503, "no worker that is ready has loaded LoRA adapter `math`")


async def test_an_adapter_under_the_models_own_name_is_loaded_under_another_and_gets_the_models_calls(fleet):
    response = await fleet.post("/load_lora_adapter", lora_name="tiny", lora_path=fleet.adapter("one"))
    assert response.status_code == 200
    assert fleet.held == [["tiny@1"]] * 2
    for fields in ({"model": "tiny"}, {}):
        response = await fleet.generate(**fields)
        assert (response.json()["model"], response.headers["x-headrace-adapter"]) == ("tiny", "tiny@1")
    assert {(request.model, request.lora_name) for request in sent(fleet)} == {("tiny", "tiny@1")}
    assert (await fleet.unload("tiny")).status_code == 200
    assert "x-headrace-adapter" not in (await fleet.generate(model="tiny")).headers
    assert fleet.held == [[], []]


async def test_a_call_that_waits_at_the_gate_gets_the_adapter_that_stands_in_for_the_model(fleet):
    await fleet.load("tiny", fleet.adapter("one"))
    for name in fleet.workers:
        fleet.move(name, "paused")
    responses = []

    async def call() -> None:
        responses.append(await fleet.generate())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(call)
        while not fleet.proxy.fleet.gate.waiting:
            await wait_all_tasks_blocked(0.01)
        fleet.move("w0", "ready")
    assert responses[0].headers["x-headrace-adapter"] == "tiny@1"


async def test_beside_an_adapter_under_the_models_name_another_one_can_be_named(fleet):
    await fleet.load("tiny", fleet.adapter("one"))
    await fleet.load("math", fleet.adapter("two"))
    assert (await fleet.generate(model="tiny", lora_name="math")).headers["x-headrace-adapter"] == "math"


async def test_calls_in_flight_keep_their_version_and_the_next_one_gets_the_new(fleet):
    await fleet.load("math", fleet.adapter("one"))
    gate = trio.Event()
    fleet.lanes["w0"]._scripts = fleet.lanes["w1"]._scripts = ([gate, output(7, finish="stop")], [output(8, finish="stop")])
    responses = []

    async def call() -> None:
        responses.append(await fleet.generate(model="math"))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(call)
        while not sent(fleet):
            await wait_all_tasks_blocked(0.01)
        assert (await fleet.load("math", fleet.adapter("two"), load_inplace=True)).status_code == 200
        await wait_all_tasks_blocked(0.01)
        assert fleet.held == [["math", "math@1"]] * 2
        for worker in ("w0", "w1"):
            fleet.lanes[worker]._scripts = ([output(8, finish="stop")],)
        assert (await fleet.generate(model="math")).headers["x-headrace-adapter"] == "math@1"
        assert fleet.held == [["math", "math@1"]] * 2
        gate.set()
    assert responses[0].headers["x-headrace-adapter"] == "math"
    await wait_all_tasks_blocked(0.01)
    assert fleet.held == [["math@1"]] * 2


async def test_an_unloaded_adapter_stays_on_the_workers_until_its_last_call_has_settled(fleet):
    await fleet.load("math", fleet.adapter("one"))
    gate = trio.Event()
    fleet.lanes["w0"]._scripts = fleet.lanes["w1"]._scripts = ([gate, output(7, finish="stop")],)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: fleet.generate(model="math"))
        while not sent(fleet):
            await wait_all_tasks_blocked(0.01)
        assert (await fleet.unload("math")).status_code == 200
        assert (await fleet.generate(model="math")).status_code == 404
        assert fleet.held == [["math"]] * 2
        gate.set()
    await wait_all_tasks_blocked(0.01)
    assert fleet.held == [[], []]


async def test_a_call_that_its_client_gives_up_no_longer_keeps_its_version(fleet):
    await fleet.load("math", fleet.adapter("one"))
    fleet.lanes["w0"]._scripts = fleet.lanes["w1"]._scripts = ([trio.Event(), output(7, finish="stop")],)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: fleet.generate(model="math"))
        while not sent(fleet):
            await wait_all_tasks_blocked(0.01)
        assert (await fleet.adapters())["math"]["calls"] == 1
        nursery.cancel_scope.cancel()
    assert (await fleet.adapters())["math"]["calls"] == 0


async def test_a_call_that_is_refused_no_longer_keeps_its_version(fleet):
    await fleet.load("math", fleet.adapter("one"))
    assert (await fleet.generate(model="math", lora_nmae="math")).status_code == 400
    assert (await fleet.adapters())["math"]["calls"] == 0


async def test_models_lists_adapters_with_the_length_of_their_model(fleet):
    path = fleet.adapter("one")
    await fleet.load("math", path)
    await fleet.load("tiny", path)
    cards = (await fleet.client.get("/v1/models")).json()["data"]
    told = [(card["id"], card["root"], card["parent"], card["max_model_len"]) for card in cards]
    assert told == [("tiny", "tiny", None, 100), ("math", path, "tiny", 100)]


async def test_a_relayed_call_names_the_version_in_its_body(fleet):
    await fleet.load("tiny", fleet.adapter("one"))
    call, body = parse_relayed(b'{"model":"tiny","messages":[]}', {})
    fleet.plugin.receive_call(call)
    assert body.lower(call)["model"] == "tiny@1"
    fleet.plugin.call_settled(call)


async def test_a_call_without_an_adapter_is_left_as_it_is(fleet):
    await fleet.load("math", fleet.adapter("one"))
    call = make_call(model="tiny", needs={OVER_GRPC})
    before = msgspec.structs.asdict(call)
    fleet.plugin.receive_call(call)
    assert fleet.plugin.eligible_workers(call, ()) is None
    assert msgspec.structs.asdict(call) == before


def test_the_settings_default_to_no_path_at_all():
    assert Settings() == Settings(allowed_paths=[], hub=False, shared_files=True, deadline=120.0)
    assert Lora.settings_type is Settings
