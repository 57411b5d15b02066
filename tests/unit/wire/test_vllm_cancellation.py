"""The real server and calls cancelled in bursts: see `core.wire.grpc.resets`."""

import pytest
import trio

from core.wire.generated.inference_pb2 import GenerateRequest, GenerateResponse
from core.wire.grpc import open_channel
from tests.workers import RunningWorker
from tests.workers.scripted_engine.behaviour import Behaviour

GENERATE = "/vllm.Inference/Generate"


def silent() -> GenerateRequest:
    """A request that the scripted engine never answers."""
    request = GenerateRequest()
    request.token_ids.ids.extend([Behaviour.SILENT, 65])
    return request


def left_in_engine(worker: RunningWorker, since: int) -> set[str]:
    """Requests that reached the engine after its first `since` events, and that nobody has aborted.

    vllm-rs 0.33 itself lets an abort overtake the request that it is for, when the call ends in the moment in which it is handed
    over; the engine then keeps that request, and nothing that a client can do removes it (`Control.Abort` no longer knows it).
    """
    left: set[str] = set()
    ended: set[str] = set()
    for event in worker.engine_events()[since:]:
        match event["event"]:
            case "add":
                left.add(event["request_id"])
            case "finish":
                ended.add(event["request_id"])
            case "abort":
                ended.update(event["request_ids"])
    return left - ended


@pytest.mark.parametrize("delay", [None, 0, 0.001])
async def test_calls_cancelled_as_soon_as_they_are_made_leave_the_others_alone(scripted_worker: RunningWorker, delay):
    since = len(scripted_worker.engine_events())
    host, _, port = scripted_worker.grpc.rpartition(":")
    async with open_channel(host, int(port)) as channel, trio.open_nursery() as others:
        for _ in range(5):
            others.start_soon(channel.unary, GENERATE, GenerateResponse, silent())
            async with trio.open_nursery() as burst:
                for _ in range(90):
                    burst.start_soon(channel.unary, GENERATE, GenerateResponse, silent())
                if delay is not None:
                    await trio.sleep(delay)
                burst.cancel_scope.cancel()
        request = GenerateRequest()
        request.token_ids.ids.extend([65, 66])
        request.stopping.max_new_tokens = 1
        await channel.unary(GENERATE, GenerateResponse, request)
        assert channel.calls == 5
        others.cancel_scope.cancel()
    with trio.fail_after(10):
        while await trio.to_thread.run_sync(left_in_engine, scripted_worker, since):  # noqa: ASYNC110 - it has to be asked
            await trio.sleep(0.05)
