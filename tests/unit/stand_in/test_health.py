"""The health service, and how a server leaves."""

import asyncio

import pytest
from grpclib.const import Status

from core.wire.generated import inference_pb2 as pb
from core.wire.generated import vllm
from core.wire.generated.grpc.health.v1 import HealthCheckRequest, HealthCheckResponseServingStatus
from tests.unit.stand_in.serving import begin, over_asyncio, refusal, worker

SERVING = HealthCheckResponseServingStatus.SERVING
NOT_SERVING = HealthCheckResponseServingStatus.NOT_SERVING


@pytest.mark.parametrize("name", ["", "vllm.Inference", "vllm.Control"])
@over_asyncio
async def test_a_worker_serves_from_the_start_and_while_it_is_paused(name):
    async with worker() as stand_in:
        assert (await stand_in.health.check(HealthCheckRequest(service=name))).status is SERVING
        await stand_in.post("/sleep")
        assert (await stand_in.health.check(HealthCheckRequest(service=name))).status is SERVING


@over_asyncio
async def test_an_unknown_service_is_not_found_by_check_and_by_watch():
    async with worker() as stand_in:
        unknown = HealthCheckRequest(service="other")
        assert (await refusal(stand_in.health.check(unknown)))[0] is Status.NOT_FOUND
        assert (await refusal(anext(stand_in.health.watch(unknown))))[0] is Status.NOT_FOUND


@over_asyncio
async def test_a_server_that_leaves_says_so_and_ends_its_watches():
    async with worker() as stand_in:
        watch = stand_in.health.watch(HealthCheckRequest())
        assert (await anext(watch)).status is SERVING
        stand_in.ending.set()
        assert [response.status async for response in watch] == [NOT_SERVING]


@over_asyncio
async def test_without_a_shutdown_timeout_running_calls_are_cut():
    async with worker(token_delay=0.001) as stand_in:
        running, _ = await begin(stand_in)
        stand_in.ending.set()
        assert (await refusal(running))[0] is Status.UNAVAILABLE


@over_asyncio
async def test_within_the_shutdown_timeout_running_calls_finish():
    async with worker(token_delay=0.001, shutdown_timeout=10.0) as stand_in:
        running, _ = await begin(stand_in, "stopping { max_new_tokens: 50 }")
        stand_in.ending.set()
        assert (await running)[-1].outputs.finish_info.finish_reason == pb.FinishInfo.LENGTH


@over_asyncio
async def test_a_server_that_leaves_accepts_no_new_connection():
    async with worker(token_delay=0.001, shutdown_timeout=10.0) as stand_in:
        running, _ = await begin(stand_in, "stopping { max_new_tokens: 100 }")
        watch = stand_in.health.watch(HealthCheckRequest())
        await anext(watch)
        stand_in.ending.set()
        async for _ in watch:
            pass
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(stand_in.ready.host, stand_in.ready.grpc_port)
        await running


@over_asyncio
async def test_the_shutdown_rpc_ends_the_server():
    async with worker() as stand_in:
        await stand_in.control.shutdown(vllm.ShutdownRequest())
        await stand_in.ending.wait()
