"""LoRA adapters: loading, choosing, unloading, and the rule for local paths."""

import pytest
from grpclib.const import Status

from core.wire.generated import vllm
from plugins.stand_in.engine.adapters import ALLOWED_PREFIXES, Adapters
from plugins.stand_in.engine.refusal import Problem, Refused
from tests.unit.stand_in.serving import Worker, body, over_asyncio, refusal, request, worker


async def load(stand_in: Worker, name: str, path: str) -> vllm.LoraAdapter:
    response = await stand_in.control.load_lora(vllm.LoadLoraRequest(lora_name=name, source_path=path))
    assert response.adapter is not None
    return response.adapter


async def names(stand_in: Worker) -> list[str]:
    return [adapter.lora_name for adapter in (await stand_in.control.list_loras(vllm.ListLorasRequest())).adapters]


@over_asyncio
async def test_an_adapter_changes_the_tokens_and_both_wires_choose_it():
    async with worker() as stand_in:
        base = await stand_in.tokens(request())
        await load(stand_in, "tuned", "hub/tuned")
        tuned = await stand_in.tokens(request('lora_name: "tuned"'))
        assert tuned != base
        assert (await stand_in.generate_http(body(model="tuned")))["choices"][0]["token_ids"] == tuned
        assert (await stand_in.generate_http(body(model="stand-in")))["choices"][0]["token_ids"] == base


@over_asyncio
async def test_an_adapters_tokens_come_from_its_path():
    async with worker() as stand_in:
        for name, path in (("a", "hub/one"), ("b", "hub/one"), ("c", "hub/two")):
            await load(stand_in, name, path)
        a, b, c = [await stand_in.tokens(request(f'lora_name: "{name}"')) for name in "abc"]
        assert a == b
        assert a != c


@over_asyncio
async def test_adapters_are_listed_by_name_and_ids_are_never_used_twice():
    async with worker() as stand_in:
        assert [(await load(stand_in, name, "hub/x")).lora_id for name in ("b", "a")] == [1, 2]
        assert await names(stand_in) == ["a", "b"]
        unloaded = await stand_in.control.unload_lora(vllm.UnloadLoraRequest(lora_name="a"))
        assert unloaded.adapter == vllm.LoraAdapter(lora_id=2, lora_name="a", source_path="hub/x")
        assert (await load(stand_in, "a", "hub/x")).lora_id == 3


@pytest.mark.parametrize(
    ("name", "path", "status"),
    [
        ("", "hub/x", Status.INVALID_ARGUMENT),
        (" ", "hub/x", Status.INVALID_ARGUMENT),
        ("a", "", Status.INVALID_ARGUMENT),
        ("a", "/etc", Status.INVALID_ARGUMENT),
        ("a", "./x", Status.INVALID_ARGUMENT),
        ("a", "~/x", Status.INVALID_ARGUMENT),
        ("stand-in", "hub/x", Status.ALREADY_EXISTS),
        ("there", "hub/x", Status.ALREADY_EXISTS),
    ],
)
@over_asyncio
async def test_what_can_not_be_loaded(name, path, status):
    async with worker() as stand_in:
        await load(stand_in, "there", "hub/there")
        assert (await refusal(load(stand_in, name, path)))[0] is status
        assert await names(stand_in) == ["there"]


@over_asyncio
async def test_what_is_not_loaded_is_not_found():
    async with worker() as stand_in:
        unload = stand_in.control.unload_lora(vllm.UnloadLoraRequest(lora_name="other"))
        assert (await refusal(unload))[0] is Status.NOT_FOUND
        assert (await refusal(stand_in.generate(request('lora_name: "other"'))))[0] is Status.NOT_FOUND
        response = await stand_in.post("/inference/v1/generate", body(model="other"))
        assert (response.status_code, response.json()["error"]["param"]) == (404, "model")


@over_asyncio
async def test_without_lora_everything_about_it_is_a_failed_precondition():
    async with worker(enable_lora=False) as stand_in:
        for call in (load(stand_in, "a", "hub/x"), names(stand_in), stand_in.generate(request('lora_name: "a"'))):
            assert (await refusal(call))[0] is Status.FAILED_PRECONDITION
        info = await stand_in.control.get_model_info(vllm.GetModelInfoRequest())
        assert not info.supports_lora
        assert len((await stand_in.http.get("/v1/models")).json()["data"]) == 1


@over_asyncio
async def test_over_http_an_adapter_can_be_replaced_in_place_and_keeps_its_id():
    async with worker() as stand_in:
        one, two = ({"lora_name": "a", "lora_path": path} for path in ("hub/one", "hub/two"))
        loaded = await stand_in.post("/v1/load_lora_adapter", one)
        assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'a' added successfully.")
        again = await stand_in.post("/v1/load_lora_adapter", two)
        assert (again.status_code, again.json()["error"]["param"]) == (400, "lora_name")
        before = await stand_in.tokens(request('lora_name: "a"'))
        assert (await stand_in.post("/v1/load_lora_adapter", {**two, "load_inplace": True})).status_code == 200
        assert await stand_in.tokens(request('lora_name: "a"')) != before
        (adapter,) = (await stand_in.control.list_loras(vllm.ListLorasRequest())).adapters
        assert (adapter.lora_id, adapter.source_path) == (1, "hub/two")
        (_, card) = (await stand_in.http.get("/v1/models")).json()["data"]
        assert (card["id"], card["root"], card["parent"], card["max_model_len"]) == ("a", "hub/two", "stand-in", None)


@pytest.mark.parametrize(
    ("json", "status", "param"),
    [
        ({"lora_name": "zz"}, 404, "model"),
        ({"lora_name": ""}, 400, "lora_name"),
        ({"lora_name": "a", "lora_int_id": 9}, 400, "lora_int_id"),
    ],
)
@over_asyncio
async def test_what_can_not_be_unloaded_over_http(json, status, param):
    async with worker() as stand_in:
        await load(stand_in, "a", "hub/x")
        response = await stand_in.post("/v1/unload_lora_adapter", json)
        assert (response.status_code, response.json()["error"]["param"]) == (status, param)
        assert await names(stand_in) == ["a"]


def test_local_paths_must_lie_under_an_allowed_prefix(tmp_path):
    inside, outside = tmp_path / "allowed" / "x", tmp_path / "other"
    inside.mkdir(parents=True)
    (inside / "adapter_config.json").touch()
    outside.mkdir()
    (tmp_path / "allowed" / "link").symlink_to(outside)
    adapters = Adapters(enabled=True, reserved=(), environment={ALLOWED_PREFIXES: f"/nowhere:{tmp_path / 'allowed'}"})
    assert adapters.load("in", str(inside)).id == 1
    for path in (outside, tmp_path / "allowed" / "link", tmp_path / "allowed" / "missing", "~"):
        with pytest.raises(Refused) as caught:
            adapters.load("out", str(path))
        assert caught.value.problem is Problem.INVALID


def test_a_local_folder_without_an_adapter_uses_up_an_id_and_loads_nothing(tmp_path):
    adapters = Adapters(enabled=True, reserved=(), environment={ALLOWED_PREFIXES: "/"})
    with pytest.raises(Refused, match="there is no adapter in") as caught:
        adapters.load("a", str(tmp_path))
    assert caught.value.problem is Problem.INTERNAL
    assert adapters.list() == []
    assert adapters.load("a", "hub/a").id == 2


def test_a_prefix_that_is_not_absolute_is_the_servers_fault(tmp_path):
    adapters = Adapters(enabled=True, reserved=(), environment={ALLOWED_PREFIXES: "relative"})
    with pytest.raises(Refused) as caught:
        adapters.load("a", str(tmp_path))
    assert caught.value.problem is Problem.INTERNAL


def test_what_does_not_look_local_and_does_not_exist_is_a_name_on_a_hub():
    adapters = Adapters(enabled=True, reserved=(), environment={})
    for name, path in (("a", "org/model"), ("b", "s3://bucket/x"), ("c", "model")):
        assert adapters.load(name, path).path == path
