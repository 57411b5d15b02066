"""Hand-offs between two stand-ins: the blocks of a prefill are kept until its decode has them, or its lease is over."""

import asyncio
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict, ParseDict
from grpclib.const import Status

from plugins.stand_in.engine.call import Call, Sampling
from plugins.stand_in.engine.checks import Plan
from plugins.stand_in.engine.handoff import Handoffs
from plugins.stand_in.options import Options
from tests.unit.stand_in.serving import Worker, over_asyncio, refusal, request, worker

PROMPT = range(1, 40)


async def prefill(stand_in: Worker) -> dict[str, Any]:
    message = request(prompt=PROMPT, tokens=1)
    ParseDict({"do_remote_decode": True}, message.kv.kv_transfer_params)
    return MessageToDict((await stand_in.generate(message)).outputs.finish_info.kv_transfer_params)


def decode(params: dict[str, Any]):
    message = request(prompt=PROMPT)
    ParseDict(params, message.kv.kv_transfer_params)
    return message


async def kept(stand_in: Worker) -> bool:
    metrics = (await stand_in.http.get("/metrics")).text.splitlines()
    return next(float(line.split()[-1]) for line in metrics if line.startswith("vllm:kv_cache_usage_perc{")) > 0


@over_asyncio
async def test_a_decode_makes_the_tokens_of_an_aggregated_call_and_frees_the_blocks_of_its_prefill():
    async with worker() as first, worker() as second:
        params = await prefill(first)
        assert await kept(first)
        assert await second.tokens(decode(params)) == await first.tokens(request(prompt=PROMPT))
        assert not await kept(first)


@over_asyncio
async def test_blocks_can_be_had_once():
    async with worker() as first, worker() as second:
        params = await prefill(first)
        await second.generate(decode(params))
        assert await refusal(second.generate(decode(params))) == (Status.INTERNAL, "engine failed during generation")


@over_asyncio
async def test_a_decode_without_its_prefill_fails():
    async with worker() as second:
        async with worker() as first:
            params = await prefill(first)
        assert (await refusal(second.generate(decode(params))))[0] is Status.INTERNAL
        unknown = {**params, "remote_host": "127.0.0.1", "remote_port": 1}
        assert (await refusal(second.generate(decode(unknown))))[0] is Status.INTERNAL


@over_asyncio
async def test_a_decode_that_is_cancelled_in_the_middle_of_it_frees_nothing():
    async with worker() as first, worker(kv_transfer_delay=60) as second:
        params = await prefill(first)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await second.generate(decode(params))
        assert await kept(first)


def test_what_nobody_comes_for_is_freed_when_its_lease_is_over():
    now = [0.0]
    handoffs = Handoffs(Options(kv_lease=30), clock=lambda: now[0])
    call = Call(request_id="r1", prompt=(1,), sampling=Sampling(), kv_transfer_params={"do_remote_decode": True})
    params = handoffs.hand_over(Plan(call, tuple(range(17)), 1), 0)
    assert params is not None
    now[0] = 29.9
    assert (handoffs.blocks, handoffs.has(params["remote_request_id"]), handoffs.expired) == (2, True, 0)
    now[0] = 30.0
    assert (handoffs.blocks, handoffs.has(params["remote_request_id"]), handoffs.expired) == (0, False, 1)
