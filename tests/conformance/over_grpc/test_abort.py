"""Ending a call before its time: by its id, by letting go of it, by its deadline."""

import pytest
import trio

from core.wire import Status
from core.wire.generated import inference_pb2 as pb
from core.wire.generated import vllm
from tests.conformance.over_grpc.client import client_of, refusal, request
from tests.conformance.over_grpc.coverage import exercises
from tests.proxy import wait_for

#: Far more tokens than are ever awaited here.
LONG = 2000
ABORTED = pb.FinishInfo.ABORTED


@pytest.fixture
async def client(slow_worker, seen):
    async with client_of(slow_worker, seen) as client:
        yield client


async def idle(client):
    """Return when the engine has no request any more."""
    await trio.to_thread.run_sync(lambda: wait_for(lambda: client.worker.running_requests() == 0))


@exercises("Control.Abort", "AbortRequest.request_ids")
async def test_an_aborted_stream_ends_well_with_what_it_had(client):
    async with client.opened(request('request_id: "gone"', tokens=LONG)) as stream:
        seen = [await stream.recv_message(), await stream.recv_message()]
        await client.control.abort(vllm.AbortRequest(request_ids=["gone", "unknown"]))
        seen += [message async for message in stream]
    info = seen[-1].outputs.finish_info
    assert info.finish_reason == ABORTED
    assert 1 <= info.num_output_tokens == sum(message.outputs.num_tokens for message in seen) < LONG
    await idle(client)


async def test_an_abort_before_the_first_token_still_tells_of_the_prompt(scripted):
    async with scripted.opened(request('request_id: "early"', prompt=[1, 65])) as stream:
        await trio.to_thread.run_sync(lambda: wait_for(lambda: scripted.worker.running_requests() == 1))
        await scripted.control.abort(vllm.AbortRequest(request_ids=["early"]))
        messages = [message async for message in stream]
    assert [message.HasField("prompt_info") for message in messages] == [True, False]
    assert messages[1].outputs.finish_info == pb.FinishInfo(finish_reason=ABORTED, num_cached_tokens=0)


async def test_every_call_with_the_id_is_aborted(scripted):
    replies = []

    async def call():
        replies.append(await scripted.generate(request('request_id: "same"', prompt=[1, 65])))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(call)
        nursery.start_soon(call)
        await trio.to_thread.run_sync(lambda: wait_for(lambda: scripted.worker.running_requests() == 2))
        await scripted.control.abort(vllm.AbortRequest(request_ids=["same"]))
    assert [reply.outputs.finish_info.finish_reason for reply in replies] == [ABORTED, ABORTED]


async def test_aborting_nothing_is_fine(client):
    assert await client.control.abort(vllm.AbortRequest()) == vllm.AbortResponse()


async def test_a_stream_that_is_left_leaves_the_engine(client):
    async with client.opened(request(tokens=LONG)) as stream:
        await stream.recv_message()
    await idle(client)


async def test_a_unary_call_that_is_cancelled_leaves_the_engine(scripted):
    async with trio.open_nursery() as nursery:
        nursery.start_soon(scripted.generate, request(prompt=[1, 65]))
        await trio.to_thread.run_sync(lambda: wait_for(lambda: scripted.worker.running_requests() == 1))
        nursery.cancel_scope.cancel()
    await idle(scripted)


async def test_a_deadline_ends_the_call_on_both_sides(scripted):
    path = "/vllm.Inference/Generate"
    call = scripted.channel.unary(path, pb.GenerateResponse, request(prompt=[1, 65]), timeout=0.3)
    # The server keeps the time, too, and may be the first to say so: with CANCELLED (tonic).
    assert (await refusal(call))[0] in (Status.DEADLINE_EXCEEDED, Status.CANCELLED)
    await idle(scripted)
