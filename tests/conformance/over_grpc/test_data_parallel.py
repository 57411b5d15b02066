"""Workers with several engines, and the metadata that names one."""

import pytest
import trio

from core.wire import Status
from core.wire.generated import vllm
from tests.conformance.over_grpc.client import client_of, refusal, request
from tests.conformance.ranks import Ranks


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


async def test_each_call_goes_to_the_rank_that_it_names(two_ranks, seen):
    ranks, went = Ranks(two_ranks), []
    async with client_of(two_ranks, seen) as client:
        for rank in ("1", "0", "1"):
            await client.generate(request(), x_data_parallel_rank=rank)
            went.append(await trio.to_thread.run_sync(ranks.since))
        await client.stream(request(), x_data_parallel_rank="1")
        went.append(await trio.to_thread.run_sync(ranks.since))
    assert went == [1, 0, 1, 1]


async def test_a_server_of_several_ranks_tells_how_many_there_are(two_ranks, seen):
    async with client_of(two_ranks, seen) as client:
        info = await client.control.get_server_info(vllm.GetServerInfoRequest())
        status, message = await refusal(client.generate(request(), x_data_parallel_rank="2"))
    parallelism = info.parallelism
    assert parallelism is not None
    assert (parallelism.data_parallel_size, parallelism.data_parallel_size_local, parallelism.world_size) == (2, 2, 3)
    assert info.total_kv_blocks == 2 * {"scripted": 4096, "stand-in": 16384}[two_ranks.kind]
    assert status is Status.INVALID_ARGUMENT
    assert "[0, 1]" in message
