"""Pausing, sleeping, and what becomes of calls meanwhile."""

from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from core.wire import Status
from core.wire.generated import inference_pb2 as pb
from core.wire.generated import vllm
from core.wire.generated.grpc.health import v1 as health
from tests import workers
from tests.conformance.over_grpc.client import client_of, refusal, request
from tests.conformance.over_grpc.coverage import exercises
from tests.workers.scripted_engine import Behaviour

ABORT, WAIT, KEEP = vllm.PauseMode.ABORT, vllm.PauseMode.WAIT, vllm.PauseMode.KEEP
PAUSED = (Status.UNAVAILABLE, "Generation is paused. Please retry after it resumes.")


async def pause(client, mode, **options):
    await client.control.pause_generation(vllm.PauseGenerationRequest(mode=mode, **options))


async def resume(client):
    await client.control.resume_generation(vllm.ResumeGenerationRequest())


async def is_paused(client):
    return (await client.control.is_paused(vllm.IsPausedRequest())).paused


async def is_sleeping(client):
    return (await client.control.is_sleeping(vllm.IsSleepingRequest())).sleeping


@pytest.fixture
async def client(slow_worker, seen):
    async with client_of(slow_worker, seen) as client:
        yield client
        await resume(client)


@asynccontextmanager
async def held(client):
    """A call that the worker has and doesn't answer, until the block lets it."""
    replies = []

    async def call():
        replies.append(await client.generate(request()))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(call)
        await trio.testing.wait_all_tasks_blocked()
        # Behind the call, on the same connection.
        for _ in range(3):
            assert await is_paused(client)
        assert not replies
        yield
    assert replies[0].outputs.num_tokens == 4


@exercises("Control.PauseGeneration", "Control.ResumeGeneration", "Control.IsPaused", "Control.IsSleeping")
@exercises("PauseGenerationRequest.mode", "IsPausedResponse.paused", "IsSleepingResponse.sleeping")
async def test_a_pause_shows_and_ends_with_the_resume(client):
    assert not await is_paused(client)
    for mode in (ABORT, WAIT, KEEP):
        await pause(client, mode)
        assert await is_paused(client)
        assert await is_sleeping(client), "as vLLM has it"
        await resume(client)
        assert not await is_paused(client)
        assert not await is_sleeping(client)
    assert (await client.generate(request())).outputs.num_tokens == 4


async def test_resuming_what_runs_is_fine(client):
    await resume(client)
    assert not await is_paused(client)


@pytest.mark.parametrize("mode", [vllm.PauseMode.UNSPECIFIED, ABORT])
async def test_abort_ends_running_calls_with_what_they_have(client, mode):
    slow = request(prompt=[Behaviour.SLOW, 5], tokens=2000)  # the scripted engine would be through before it hears of the pause
    async with client.opened(slow) as stream:
        seen = [await stream.recv_message(), await stream.recv_message()]
        await pause(client, mode)
        seen += [message async for message in stream]
    assert seen[-1].outputs.finish_info.finish_reason == pb.FinishInfo.ABORTED
    assert 1 <= sum(message.outputs.num_tokens for message in seen) < 2000


async def test_wait_returns_when_running_calls_have_finished(client):
    async with client.opened(request(tokens=60)) as stream:
        seen = [await stream.recv_message()]
        await pause(client, WAIT)
        seen += [message async for message in stream]
    info = seen[-1].outputs.finish_info
    assert (info.num_output_tokens, info.finish_reason) == (60, pb.FinishInfo.LENGTH)


@pytest.mark.parametrize("mode", [ABORT, WAIT])
async def test_new_calls_are_refused_from_0_33_on_and_wait_before(client, version, mode):
    await pause(client, mode)
    if version < (0, 33):
        async with held(client):
            await resume(client)
        return
    assert await refusal(client.generate(request())) == PAUSED
    async with client.opened(request()) as stream:
        assert (await stream.recv_message()).HasField("prompt_info")
        assert await refusal(stream.recv_message()) == PAUSED


async def test_keep_freezes_running_calls_and_holds_new_ones(client):
    async with client.opened(request(tokens=200)) as stream:
        seen = [await stream.recv_message(), await stream.recv_message()]
        await pause(client, KEEP)
        await resume(client)
        seen += [message async for message in stream]
    assert sum(message.outputs.num_tokens for message in seen) == 200
    assert seen[-1].outputs.finish_info.finish_reason == pb.FinishInfo.LENGTH


async def test_keep_holds_new_calls(client):
    await pause(client, KEEP)
    async with held(client):
        await resume(client)


@exercises("PauseGenerationRequest.clear_cache")
async def test_a_pause_empties_the_cache_unless_told_not_to(client, version):
    prompt = [*range(35, 235), 43]

    async def cached():
        return (await client.generate(request(prompt=prompt))).outputs.finish_info.num_cached_tokens

    await cached()
    for options, kept in (({"clear_cache": False}, True), ({"clear_cache": True}, False), ({}, False)):
        await pause(client, ABORT, **options)
        await resume(client)
        assert await cached() == (192 if kept and version >= (0, 33) else 0)


async def test_an_unknown_mode_is_an_invalid_argument(client):
    assert (await refusal(pause(client, 9)))[0] is Status.INVALID_ARGUMENT


async def test_health_does_not_change(client):
    await pause(client, ABORT)
    reply = await client.health.check(health.HealthCheckRequest())
    assert reply.status == health.HealthCheckResponseServingStatus.SERVING


@exercises("Control.Sleep", "SleepRequest.level", "SleepRequest.mode", "Control.WakeUp", "WakeUpRequest.tags")
async def test_who_sleeps_holds_calls_until_all_of_it_is_awake(client):
    if client.worker.kind == "engine":
        for call in (client.control.sleep(vllm.SleepRequest()), client.control.wake_up(vllm.WakeUpRequest())):
            assert (await refusal(call))[0] is Status.FAILED_PRECONDITION, "this engine runs without sleep mode"
        return
    await client.control.sleep(vllm.SleepRequest(level=1, mode=WAIT))
    assert await is_sleeping(client)
    async with held(client):
        await client.control.wake_up(vllm.WakeUpRequest(tags=["weights"]))
        assert await is_sleeping(client)
        await client.control.wake_up(vllm.WakeUpRequest(tags=["kv_cache"]))
    assert not await is_sleeping(client)


async def test_level_0_is_a_pause(current):
    await current.control.sleep(vllm.SleepRequest(level=0, mode=KEEP))
    assert await is_paused(current)
    await current.control.wake_up(vllm.WakeUpRequest())
    assert not await is_paused(current)


async def test_without_sleep_mode_sleep_is_refused(seen):
    with workers.scripted(sleep=False) as worker:
        async with client_of(worker, seen) as client:
            for call in (client.control.sleep(vllm.SleepRequest()), client.control.wake_up(vllm.WakeUpRequest())):
                assert (await refusal(call))[0] is Status.FAILED_PRECONDITION
