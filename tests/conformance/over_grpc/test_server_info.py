"""What a worker says of itself."""

import trio

from core.wire import Status
from core.wire.generated import vllm
from tests import workers
from tests.conformance.over_grpc.client import client_of, refusal
from tests.conformance.over_grpc.coverage import exercises
from tests.proxy import wait_for
from tests.workers.processes import accepts


@exercises("Control.GetServerInfo", "ServerInfo.engine_version", "ServerInfo.api_version", "ServerInfo.instance_id")
@exercises("ServerInfo.max_model_len", "ServerInfo.kv_block_size", "ServerInfo.total_kv_blocks", "ServerInfo.max_running_requests")
@exercises("ServerInfo.max_batched_tokens", "ServerInfo.max_loras", "ServerInfo.proto_version", "ServerInfo.effective_attention_block_size")
async def test_the_server_tells_its_sizes(client, version):
    info = await client.control.get_server_info(vllm.GetServerInfoRequest())
    assert info.engine_version.startswith("0.33.0+" if version >= (0, 33) else "0.31.0")
    assert info.api_version == "vllm"
    assert info.instance_id
    assert info.max_model_len == client.worker.max_model_len
    for size in (info.kv_block_size, info.total_kv_blocks, info.max_running_requests, info.max_batched_tokens, info.max_loras):
        assert size > 0
    if version >= (0, 33):
        assert info.proto_version == "0.6.0"
        assert info.effective_attention_block_size == info.kv_block_size


@exercises("ServerInfo.parallelism", "ParallelismInfo.tensor_parallel_size", "ParallelismInfo.pipeline_parallel_size")
@exercises("ParallelismInfo.data_parallel_size", "ParallelismInfo.decode_context_parallel_size", "ParallelismInfo.world_size")
@exercises("ParallelismInfo.data_parallel_size_local")
async def test_a_server_with_one_engine_is_a_group_of_one(client, version):
    parallelism = (await client.control.get_server_info(vllm.GetServerInfoRequest())).parallelism
    assert parallelism == vllm.ParallelismInfo(
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        data_parallel_size=1,
        decode_context_parallel_size=1,
        world_size=1,
        data_parallel_size_local=1,
    )


@exercises("ServerInfo.rl_capabilities", "RlCapabilities.weight_transfer_enabled", "RlCapabilities.weight_transfer_backend")
@exercises("RlCapabilities.sleep_mode_enabled")
async def test_the_server_tells_what_training_can_ask_of_it(client):
    capabilities = (await client.control.get_server_info(vllm.GetServerInfoRequest())).rl_capabilities
    if client.worker.kind == "engine":
        assert capabilities == vllm.RlCapabilities()
    else:
        assert capabilities == vllm.RlCapabilities(weight_transfer_enabled=True, weight_transfer_backend="nccl", sleep_mode_enabled=True)


@exercises("Control.GetModelInfo", "ModelInfo.model_id", "ModelInfo.served_model_name", "ModelInfo.supports_text_input")
@exercises("ModelInfo.supports_token_ids_input", "ModelInfo.supports_lora")
async def test_the_server_tells_its_model(client):
    info = await client.control.get_model_info(vllm.GetModelInfoRequest())
    assert info.model_id
    assert (info.served_model_name, info.served_model_aliases) == (client.worker.model, [])
    assert (info.supports_text_input, info.supports_token_ids_input, info.supports_lora) == (True, True, True)
    assert not info.supports_multimodal


@exercises("ModelInfo.served_model_aliases", "ModelInfo.reasoning_parser", "ModelInfo.tool_call_parser")
@exercises("Control.GetKvEventSources", "GetKvEventSourcesResponse.sources", "KvEventSource.transport", "KvEventSource.endpoint")
@exercises("KvEventSource.topic", "KvEventSource.replay_endpoint", "KvEventSource.data_parallel_rank", "KvEventSource.encoding")
@exercises("KvEventSource.schema_version", "KvEventSource.buffer_steps", "KvEventSource.hwm", "KvEventSource.max_queue_size")
async def test_what_a_server_was_started_with_is_told(seen):
    arguments = ["--reasoning-parser", "qwen3", "--tool-call-parser", "hermes"]
    with workers.scripted(served_model_names=["tiny", "alias"], server_arguments=arguments, kv_events="tcp://*:555") as worker:
        async with client_of(worker, seen) as client:
            info = await client.control.get_model_info(vllm.GetModelInfoRequest())
            assert (info.served_model_name, info.served_model_aliases) == ("tiny", ["alias"])
            assert (info.reasoning_parser, info.tool_call_parser) == ("qwen3", "hermes")
            (source,) = (await client.control.get_kv_event_sources(vllm.GetKvEventSourcesRequest())).sources
    assert source == vllm.KvEventSource(
        transport="zmq",
        endpoint="tcp://*:555",
        replay_endpoint="tcp://*:5550",
        topic="kv",
        data_parallel_rank=0,
        encoding="msgpack",
        schema_version=1,
        buffer_steps=1000,
        hwm=2000,
        max_queue_size=3000,
    )


async def test_a_worker_without_kv_events_names_no_source(client):
    assert (await client.control.get_kv_event_sources(vllm.GetKvEventSourcesRequest())).sources == []


@exercises("Control.Shutdown")
async def test_a_server_that_did_not_start_its_engine_refuses_to_shut_down(scripted):
    assert (await refusal(scripted.control.shutdown(vllm.ShutdownRequest())))[0] is Status.FAILED_PRECONDITION


async def test_the_stand_in_shuts_down_when_told(seen):
    with workers.stand_in() as worker:
        async with client_of(worker, seen) as client:
            assert await client.control.shutdown(vllm.ShutdownRequest()) == vllm.ShutdownResponse()
        await trio.to_thread.run_sync(lambda: wait_for(lambda: not accepts(int(worker.grpc.rpartition(":")[2]))))
