"""Workers with several engines, and the metadata that names one."""

import pytest

from core.wire import Status
from core.wire.generated import vllm
from tests import workers
from tests.conformance.over_grpc.client import client_of, refusal, request


@pytest.mark.parametrize("rank", ["0", " 0 "])
async def test_the_only_rank_can_be_named(client, rank):
    assert (await client.generate(request(), x_data_parallel_rank=rank)).outputs.num_tokens == 4


@pytest.mark.parametrize("rank", ["x", "-1", "4294967296", "1.0"])
async def test_what_is_no_rank_is_an_invalid_argument(client, rank):
    assert (await refusal(client.generate(request(), x_data_parallel_rank=rank)))[0] is Status.INVALID_ARGUMENT


async def test_a_rank_that_is_not_connected_is_named_with_those_that_are(client):
    status, message = await refusal(client.generate(request(), x_data_parallel_rank="3"))
    assert status is Status.INVALID_ARGUMENT
    assert "3" in message
    assert "0" in message
    assert (await refusal(client.stream(request(), x_data_parallel_rank="3")))[0] is Status.INVALID_ARGUMENT


async def test_each_call_goes_to_the_rank_that_it_names(seen):
    with workers.scripted(data_parallel_size=2, world_size=3) as worker:
        async with client_of(worker, seen) as client:
            for rank in ("1", "0", "1"):
                await client.generate(request(), x_data_parallel_rank=rank)
            info = await client.control.get_server_info(vllm.GetServerInfoRequest())
        assert [event["rank"] for event in worker.engine_events("add")] == [1, 0, 1]
    parallelism = info.parallelism
    assert parallelism is not None
    assert (parallelism.data_parallel_size, parallelism.data_parallel_size_local, parallelism.world_size) == (2, 2, 3)
    assert info.total_kv_blocks == 2 * 4096
