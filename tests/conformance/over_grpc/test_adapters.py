"""The registry of LoRA adapters, and calls that name one."""

from contextlib import AsyncExitStack

import pytest

from core.wire import Status
from core.wire.generated import vllm
from tests import workers
from tests.conformance.over_grpc.client import client_of, refusal, request
from tests.conformance.over_grpc.coverage import exercises


@pytest.fixture
async def client(worker, seen):
    """No adapter is left when the test ends."""
    async with client_of(worker, seen) as client:
        yield client
        for adapter in await adapters(client):
            await unload(client, adapter.lora_name)


@pytest.fixture
def path(worker, tmp_path):
    """The folder of an adapter that the worker can load."""
    if worker.kind == "engine":
        return str(workers.adapter())
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8}')
    return str(tmp_path)


async def load(client, name, path):
    return (await client.control.load_lora(vllm.LoadLoraRequest(lora_name=name, source_path=path))).adapter


async def unload(client, name):
    return (await client.control.unload_lora(vllm.UnloadLoraRequest(lora_name=name))).adapter


async def adapters(client):
    return (await client.control.list_loras(vllm.ListLorasRequest())).adapters


@exercises("Control.LoadLora", "LoadLoraRequest.lora_name", "LoadLoraRequest.source_path", "LoadLoraResponse.adapter")
@exercises("LoraAdapter.lora_id", "LoraAdapter.lora_name", "LoraAdapter.source_path", "Control.ListLoras", "ListLorasResponse.adapters")
@exercises("Control.UnloadLora", "UnloadLoraRequest.lora_name", "UnloadLoraResponse.adapter")
async def test_adapters_are_listed_by_name_with_ids_that_are_never_used_twice(client, path):
    second, first = await load(client, "b", path), await load(client, "a", path)
    assert (second.lora_name, second.source_path) == ("b", path)
    assert first.lora_id == second.lora_id + 1
    assert await adapters(client) == [first, second]
    assert await unload(client, "b") == second
    assert await adapters(client) == [first]
    assert (await load(client, "b", path)).lora_id == first.lora_id + 1


@exercises("GenerateRequest.lora_name")
async def test_an_adapter_changes_the_output(client, path):
    await load(client, "a", path)
    with_adapter = await client.tokens(request('lora_name: "a"', tokens=12))
    assert with_adapter == await client.tokens(request('lora_name: "a"', tokens=12))
    assert with_adapter != await client.tokens(request(tokens=12))


async def test_an_adapter_is_not_a_model(client, path):
    await load(client, "a", path)
    assert (await refusal(client.generate(request('model: "a"'))))[0] is Status.NOT_FOUND


async def test_an_unknown_adapter_is_not_found(client):
    expected = (Status.NOT_FOUND, "LoRA adapter `nope` is not loaded")
    assert await refusal(client.generate(request('lora_name: "nope"'))) == expected
    assert (await refusal(unload(client, "nope")))[0] is Status.NOT_FOUND


async def test_a_name_can_be_taken_once(client, path):
    await load(client, "a", path)
    for name in ("a", client.worker.model):
        assert (await refusal(load(client, name, path)))[0] is Status.ALREADY_EXISTS


@pytest.mark.parametrize(("name", "where"), [("", "x"), (" ", "x"), ("a", ""), ("a", " ")])
async def test_blank_names_and_paths_are_invalid_arguments(client, name, where):
    assert (await refusal(load(client, name, where)))[0] is Status.INVALID_ARGUMENT


async def test_a_blank_name_cant_be_unloaded(client):
    assert (await refusal(unload(client, " ")))[0] is Status.INVALID_ARGUMENT


async def test_a_folder_without_an_adapter_is_an_internal_error(client, tmp_path):
    status, message = await refusal(load(client, "a", str(tmp_path / "..")))
    assert status is Status.INTERNAL
    assert "failed to load LoRA adapter `a`" in message
    assert await adapters(client) == []


async def test_without_lora_everything_about_it_is_refused(seen):
    async with AsyncExitStack() as stack:
        worker = stack.enter_context(workers.scripted(lora=False))
        client = await stack.enter_async_context(client_of(worker, seen))
        for call in (load(client, "a", "x"), unload(client, "a"), adapters(client), client.generate(request('lora_name: "a"'))):
            assert (await refusal(call))[0] is Status.FAILED_PRECONDITION
