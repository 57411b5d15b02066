"""Several data-parallel ranks in one stand-in: each has a prefix cache of its own, and all are administered as one."""

import asyncio
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict, ParseDict
from grpclib.const import Status

from core.wire.generated import vllm
from tests.unit.stand_in.serving import Worker, begin, body, over_asyncio, refusal, request, worker

PROMPT = range(1, 40)  # two blocks of 16 and some tokens


async def cached(stand_in: Worker, rank: str) -> int:
    return (await stand_in.generate(request(prompt=PROMPT), x_data_parallel_rank=rank)).outputs.finish_info.num_cached_tokens


async def counted(stand_in: Worker, name: str) -> list[float]:
    """A number out of the metrics, of each rank in turn."""
    lines = (await stand_in.http.get("/metrics")).text.splitlines()
    of_ranks = {line.split('engine="')[1][0]: float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{")}
    return [of_ranks[rank] for rank in sorted(of_ranks)]


@over_asyncio
async def test_each_rank_has_its_own_prefix_cache_and_the_same_tokens():
    async with worker(data_parallel_size=2) as stand_in:
        replies = [await stand_in.generate(request(prompt=PROMPT), x_data_parallel_rank=rank) for rank in ("0", "1", "1")]
        assert [reply.outputs.finish_info.num_cached_tokens for reply in replies] == [0, 0, 32]
        assert len({tuple(reply.outputs.token_ids) for reply in replies}) == 1
        await stand_in.post("/reset_prefix_cache")
        assert [await cached(stand_in, rank) for rank in ("0", "1")] == [0, 0]


@over_asyncio
async def test_a_call_over_http_goes_to_the_rank_of_its_header():
    async with worker(data_parallel_size=3) as stand_in:
        for rank in ("2", "1", "2", "x", "4294967296"):
            reply = await stand_in.http.post("/inference/v1/generate", json=body(), headers={"x-data-parallel-rank": rank})
            assert reply.status_code == 200
        assert await counted(stand_in, "vllm:prompt_tokens_total") == [6, 3, 6]  # what is no rank is ignored, as by vllm-rs


@over_asyncio
async def test_a_call_that_names_no_rank_goes_where_the_fewest_are():
    async with worker(data_parallel_size=2, token_delay=0.01) as stand_in:
        first, _ = await begin(stand_in)
        second, _ = await begin(stand_in)
        assert await counted(stand_in, "vllm:num_requests_running") == [1, 1]
        first.cancel()
        await asyncio.wait([first])
        while await counted(stand_in, "vllm:num_requests_running") != [0, 1]:
            pass
        third, _ = await begin(stand_in)
        assert await counted(stand_in, "vllm:num_requests_running") == [1, 1]
        for task in (second, third):
            task.cancel()


@over_asyncio
async def test_an_unknown_rank_is_refused_with_those_that_there_are():
    async with worker(data_parallel_size=2) as stand_in:
        message = "data parallel rank 2 is not connected to this worker; connected ranks: [0, 1]"
        assert await refusal(stand_in.generate(request(), x_data_parallel_rank="2")) == (Status.INVALID_ARGUMENT, message)
        for stream in (False, True):
            reply = await stand_in.http.post("/inference/v1/generate", json=body(stream=stream), headers={"x-data-parallel-rank": "2"})
            assert (reply.status_code, reply.json()["error"]["message"]) == (400, message)


@over_asyncio
async def test_its_sizes_are_those_of_all_ranks_together():
    async with worker(data_parallel_size=2, world_size=3, cache_blocks=100) as stand_in:
        info = await stand_in.control.get_server_info(vllm.GetServerInfoRequest())
        parallelism = info.parallelism
        assert parallelism is not None
        assert (parallelism.data_parallel_size, parallelism.data_parallel_size_local, parallelism.world_size) == (2, 2, 3)
        assert info.total_kv_blocks == 200
        assert (await stand_in.http.get("/get_world_size")).json() == {"world_size": 6}
        assert (await stand_in.http.get("/get_world_size?include_dp=false")).json() == {"world_size": 3}
        reply = await stand_in.post("/collective_rpc", {"method": "reload_weights"})
        assert reply.json() == {"results": [None] * 6}


@over_asyncio
async def test_a_pause_holds_the_calls_of_every_rank():
    async with worker(data_parallel_size=2, token_delay=0.01) as stand_in:
        tasks = [(await begin(stand_in))[0] for _ in range(2)]
        await stand_in.post("/pause", mode="abort")
        reasons = [(await task)[-1].outputs.finish_info.finish_reason for task in tasks]
        assert len(set(reasons)) == 1
        assert await counted(stand_in, "vllm:num_requests_running") == [0, 0]


@pytest.mark.parametrize("rank", ["0", "1"])
def test_blocks_are_handed_over_by_the_rank_that_has_them(rank: str):
    async def handed_over() -> None:
        async with worker(data_parallel_size=2) as first, worker() as second:
            message = request(prompt=PROMPT, tokens=1)
            ParseDict({"do_remote_decode": True}, message.kv.kv_transfer_params)
            reply = await first.generate(message, x_data_parallel_rank=rank)
            params: dict[str, Any] = MessageToDict(reply.outputs.finish_info.kv_transfer_params)
            assert params["remote_engine_id"].endswith(f"_dp{rank}")
            assert [usage > 0 for usage in await counted(first, "vllm:kv_cache_usage_perc")] == [rank == "0", rank == "1"]
            decode = request(prompt=PROMPT)
            ParseDict(params, decode.kv.kv_transfer_params)
            assert await second.tokens(decode) == await first.tokens(request(prompt=PROMPT))
            assert await counted(first, "vllm:kv_cache_usage_perc") == [0, 0]

    over_asyncio(handed_over)()
