"""Ending calls early: by id, by going away, by a deadline."""

import asyncio

import pytest
from grpclib.exceptions import GRPCError

from core.wire.generated import inference_pb2 as pb
from core.wire.generated import vllm
from tests.unit.stand_in.serving import ENDLESS, Worker, begin, body, over_asyncio, request, worker


async def load(stand_in: Worker) -> int:
    return (await stand_in.http.get("/load")).json()["server_load"]


@over_asyncio
async def test_abort_ends_every_call_with_the_id_and_no_other():
    async with worker(token_delay=0.001) as stand_in:
        one, _ = await begin(stand_in, ENDLESS + 'request_id: "one"')
        same, _ = await begin(stand_in, ENDLESS + 'request_id: "one"')
        other, more = await begin(stand_in, ENDLESS + 'request_id: "other"')
        await stand_in.control.abort(vllm.AbortRequest(request_ids=["one", "unknown", "one"]))
        for task in (one, same):
            assert (await task)[-1].outputs.finish_info.finish_reason == pb.FinishInfo.ABORTED
        more.clear()
        await more.wait()
        assert not other.done()
        await stand_in.post("/abort_requests", {"request_ids": ["other"]})
        await other


@over_asyncio
async def test_an_abort_without_ids_does_nothing_on_grpc_and_ends_everything_on_http():
    async with worker(token_delay=0.001) as stand_in:
        running, _ = await begin(stand_in)
        await stand_in.control.abort(vllm.AbortRequest())
        assert await load(stand_in) == 1
        assert (await stand_in.post("/abort_requests", {})).content == b""
        assert (await running)[-1].outputs.finish_info.finish_reason == pb.FinishInfo.ABORTED


@over_asyncio
async def test_an_aborted_http_call_is_200_with_abort():
    async with worker() as stand_in:
        await stand_in.post("/pause", mode="keep")
        calls = [
            asyncio.create_task(stand_in.post("/inference/v1/generate", body(request_id="x", stream=stream))) for stream in (False, True)
        ]
        while await load(stand_in) < 2:
            pass
        await stand_in.post("/abort_requests", {"request_ids": ["x"]})
        whole, stream = await asyncio.gather(*calls)
        (choice,) = whole.json()["choices"]
        assert (choice["finish_reason"], choice["token_ids"], choice["weight_versions"]) == ("abort", [], [])
        assert '"finish_reason":"abort"' in stream.text


@over_asyncio
async def test_a_client_that_cancels_takes_its_call_out_of_the_engine():
    async with worker(token_delay=0.001) as stand_in:
        running, _ = await begin(stand_in)
        assert await load(stand_in) == 1
        running.cancel()
        while await load(stand_in):
            pass


@over_asyncio
async def test_an_http_client_that_goes_away_takes_its_call_out_of_the_engine():
    async with worker(token_delay=0.001) as stand_in:
        sampling = {"max_tokens": 30000, "ignore_eos": True}
        async with stand_in.http.stream("POST", "/inference/v1/generate", json=body(sampling=sampling, stream=True)) as response:
            await anext(response.aiter_lines())
            assert await load(stand_in) == 1
        while await load(stand_in):
            pass


@over_asyncio
async def test_a_call_leaves_the_engine_at_its_deadline():
    async with worker(token_delay=0.001) as stand_in:
        with pytest.raises((GRPCError, TimeoutError)):
            await stand_in.generate(request(ENDLESS), timeout=0.05)
        while await load(stand_in):
            pass
