"""Pausing and sleeping: what happens to the calls that run, and to those that come.

A reply to a control call on the same connection means that the requests sent before it have been read.
"""

import asyncio

import pytest
from grpclib.const import Status

from core.wire.generated import inference_pb2 as pb
from core.wire.generated import vllm
from tests.unit.stand_in.serving import Worker, begin, body, over_asyncio, refusal, request, worker

ABORT, WAIT, KEEP = vllm.PauseMode.ABORT, vllm.PauseMode.WAIT, vllm.PauseMode.KEEP


async def pause(stand_in: Worker, mode: vllm.PauseMode, **fields: bool) -> None:
    await stand_in.control.pause_generation(vllm.PauseGenerationRequest(mode=mode, **fields))


async def resume(stand_in: Worker) -> None:
    await stand_in.control.resume_generation(vllm.ResumeGenerationRequest())


async def paused(stand_in: Worker) -> bool:
    return (await stand_in.control.is_paused(vllm.IsPausedRequest())).paused


@over_asyncio
async def test_abort_ends_running_calls_with_what_they_have():
    async with worker(token_delay=0.001) as stand_in:
        running, _ = await begin(stand_in)
        await pause(stand_in, ABORT)
        last = (await running)[-1].outputs
        assert last.finish_info.finish_reason == pb.FinishInfo.ABORTED
        assert last.finish_info.num_output_tokens == sum(message.outputs.num_tokens for message in await running)
        assert last.finish_info.WhichOneof("stop_reason") is None


@pytest.mark.parametrize("mode", [ABORT, WAIT, vllm.PauseMode.UNSPECIFIED])
@over_asyncio
async def test_new_calls_are_unavailable_until_the_resume(mode):
    async with worker() as stand_in:
        await pause(stand_in, mode)
        assert await paused(stand_in)
        status, message = await refusal(stand_in.generate(request()))
        assert status is Status.UNAVAILABLE
        assert "paused" in message
        await resume(stand_in)
        assert not await paused(stand_in)
        assert len(await stand_in.tokens(request())) == 4


@over_asyncio
async def test_a_stream_that_is_refused_while_paused_has_prompt_info_first():
    async with worker() as stand_in:
        await pause(stand_in, ABORT)
        messages = stand_in.stream(request())
        assert (await anext(messages)).prompt_info.num_prompt_tokens == 3
        assert (await refusal(anext(messages)))[0] is Status.UNAVAILABLE


@over_asyncio
async def test_over_http_a_paused_call_is_503_and_a_stream_says_so_in_an_event():
    async with worker() as stand_in:
        await stand_in.post("/pause")
        response = await stand_in.post("/inference/v1/generate", body())
        assert (response.status_code, response.json()["error"]["type"]) == (503, "ServiceUnavailableError")
        stream = await stand_in.post("/inference/v1/generate", body(stream=True))
        assert stream.status_code == 200
        assert '"code":503' in stream.text
        assert stream.text.endswith("data: [DONE]\n\n")


@over_asyncio
async def test_wait_returns_when_the_running_calls_have_finished():
    async with worker(token_delay=0.001) as stand_in:
        running, _ = await begin(stand_in, "stopping { max_new_tokens: 50 }")
        await pause(stand_in, WAIT)
        assert (await running)[-1].outputs.finish_info.finish_reason == pb.FinishInfo.LENGTH


@over_asyncio
async def test_a_resume_on_grpc_waits_for_a_pause_that_waits_and_one_on_http_does_not():
    async with worker(token_delay=0.001) as stand_in:
        running, _ = await begin(stand_in)
        waiting = asyncio.create_task(pause(stand_in, WAIT))
        while not await paused(stand_in):
            pass
        resuming = asyncio.create_task(resume(stand_in))
        assert await paused(stand_in)
        assert (await stand_in.post("/resume")).status_code == 200
        assert not await paused(stand_in)
        assert not waiting.done()
        assert not resuming.done()
        await stand_in.post("/abort_requests", {})
        await asyncio.gather(waiting, resuming, running)


@over_asyncio
async def test_keep_freezes_running_calls_and_they_go_on_with_the_same_tokens():
    async with worker(token_delay=0.001) as stand_in:
        expected = await stand_in.tokens(request(tokens=60))
        running, more = await begin(stand_in, "stopping { max_new_tokens: 60 }")
        await pause(stand_in, KEEP)
        await paused(stand_in)  # what was made before the pause has arrived
        more.clear()
        for _ in range(10):
            await paused(stand_in)
        assert not more.is_set()
        await resume(stand_in)
        messages = await running
        assert [token for message in messages for token in message.outputs.token_ids] == expected


@over_asyncio
async def test_keep_makes_new_calls_wait_for_the_resume():
    async with worker() as stand_in:
        await pause(stand_in, KEEP)
        queued = asyncio.create_task(stand_in.tokens(request()))
        assert await paused(stand_in)
        assert 'vllm:num_requests_waiting{model_name="stand-in",engine="0"} 1' in (await stand_in.http.get("/metrics")).text
        assert not queued.done()
        await resume(stand_in)
        assert len(await queued) == 4


@over_asyncio
async def test_abort_after_keep_ends_frozen_and_queued_calls():
    async with worker(token_delay=0.001) as stand_in:
        frozen, _ = await begin(stand_in)
        await pause(stand_in, KEEP)
        queued = asyncio.create_task(stand_in.generate(request()))
        await paused(stand_in)
        await pause(stand_in, ABORT)
        assert (await frozen)[-1].outputs.finish_info.finish_reason == pb.FinishInfo.ABORTED
        finish = (await queued).outputs.finish_info
        assert (finish.finish_reason, finish.num_output_tokens, finish.num_cached_tokens) == (pb.FinishInfo.ABORTED, 0, 0)
        assert (await queued).prompt_info.num_prompt_tokens == 3


@over_asyncio
async def test_an_unknown_mode_is_an_invalid_argument():
    async with worker() as stand_in:
        unknown = vllm.PauseGenerationRequest()
        unknown.mode = vllm.PauseMode(9)
        assert (await refusal(stand_in.control.pause_generation(unknown)))[0] is Status.INVALID_ARGUMENT
        assert not await paused(stand_in)
        response = await stand_in.post("/pause", mode="later")
        assert (response.status_code, response.json()["error"]["param"]) == (400, "mode")


@over_asyncio
async def test_a_resume_without_a_pause_is_fine():
    async with worker() as stand_in:
        await resume(stand_in)
        assert not await paused(stand_in)


@over_asyncio
async def test_a_sleeping_worker_queues_calls_until_everything_is_awake():
    async with worker() as stand_in:
        await stand_in.control.sleep(vllm.SleepRequest())
        assert (await stand_in.control.is_sleeping(vllm.IsSleepingRequest())).sleeping
        queued = asyncio.create_task(stand_in.tokens(request()))
        await stand_in.control.wake_up(vllm.WakeUpRequest(tags=["weights"]))
        assert (await stand_in.control.is_sleeping(vllm.IsSleepingRequest())).sleeping
        assert not queued.done()
        await stand_in.control.wake_up(vllm.WakeUpRequest(tags=["kv_cache"]))
        assert not await paused(stand_in)
        assert len(await queued) == 4


@over_asyncio
async def test_is_sleeping_is_true_while_merely_paused():
    async with worker() as stand_in:
        await pause(stand_in, KEEP)
        assert (await stand_in.http.get("/is_sleeping")).json() == {"is_sleeping": True}


@over_asyncio
async def test_level_two_loses_the_weights_without_a_word():
    async with worker() as stand_in:
        before = await stand_in.tokens(request())
        await stand_in.post("/sleep", level=1)
        assert (await stand_in.post("/wake_up")).json() == {"status": "awake", "tags": None}
        assert await stand_in.tokens(request()) == before
        await stand_in.post("/sleep", level=2)
        await stand_in.post("/wake_up")
        assert await stand_in.tokens(request()) != before
        await stand_in.post("/collective_rpc", {"method": "reload_weights"})
        assert await stand_in.tokens(request()) == before


@over_asyncio
async def test_without_sleep_mode_sleep_is_refused():
    async with worker(enable_sleep_mode=False) as stand_in:
        for call in (stand_in.control.sleep(vllm.SleepRequest()), stand_in.control.wake_up(vllm.WakeUpRequest())):
            assert (await refusal(call))[0] is Status.FAILED_PRECONDITION
        assert (await stand_in.post("/sleep")).status_code == 500
        assert not await paused(stand_in)
        assert (await stand_in.post("/sleep", level=3)).json()["error"]["param"] == "level"
