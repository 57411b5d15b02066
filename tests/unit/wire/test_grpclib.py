"""What stubs generated for grpclib need of a channel, and grpclib's own server at the other end."""

from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
import trio
from grpclib.metadata import Deadline

from core.wire.generated.grpc.health.v1 import HealthBase, HealthCheckRequest, HealthCheckResponse, HealthStub
from core.wire.generated.grpc.health.v1 import HealthCheckResponseServingStatus as Serving
from core.wire.grpc import Cardinality, Channel, GRPCError, Status, open_channel
from tests.unit.wire.servers import grpclib_server


class Health(HealthBase):
    async def check(self, message: HealthCheckRequest) -> HealthCheckResponse:
        if message.service == "unknown":
            raise GRPCError(Status.NOT_FOUND, "no such service: ünknown")
        return HealthCheckResponse(status=Serving.SERVING)

    async def watch(self, message: HealthCheckRequest) -> AsyncIterator[HealthCheckResponse]:
        for status in (Serving.SERVING, Serving.NOT_SERVING):
            yield HealthCheckResponse(status=status)
        if message.service == "unknown":
            raise GRPCError(Status.UNAVAILABLE, "gone")


@pytest.fixture(scope="module")
def port():
    with grpclib_server(Health()) as port:
        yield port


def stub(channel: Channel, **options: Any) -> HealthStub:
    return HealthStub(cast("Any", channel), **options)


async def test_a_generated_stub_makes_a_unary_call(port):
    async with open_channel("127.0.0.1", port) as channel:
        reply = await stub(channel).check(HealthCheckRequest(service=""))
    assert reply.status is Serving.SERVING


async def test_a_generated_stub_reads_a_stream(port):
    async with open_channel("127.0.0.1", port) as channel:
        statuses = [reply.status async for reply in stub(channel).watch(HealthCheckRequest())]
    assert statuses == [Serving.SERVING, Serving.NOT_SERVING]


async def test_a_generated_stub_raises_what_the_server_raised(port):
    async with open_channel("127.0.0.1", port) as channel:
        with pytest.raises(GRPCError, match="ünknown") as caught:
            await stub(channel).check(HealthCheckRequest(service="unknown"))
        assert caught.value.status is Status.NOT_FOUND
        replies = stub(channel).watch(HealthCheckRequest(service="unknown")).__aiter__()
        assert [(await anext(replies)).status, (await anext(replies)).status] == [Serving.SERVING, Serving.NOT_SERVING]
        with pytest.raises(GRPCError, match="gone"):
            await anext(replies)


async def test_a_stubs_timeout_deadline_and_metadata_reach_the_channel(port):
    async with open_channel("127.0.0.1", port) as channel:
        health = stub(channel, timeout=5, metadata={"x-data-parallel-rank": "0"})
        assert await health.check(HealthCheckRequest(), deadline=Deadline.from_timeout(5))
        with pytest.raises(GRPCError) as caught:
            await health.check(HealthCheckRequest(), deadline=Deadline.from_timeout(0))
    assert caught.value.status is Status.DEADLINE_EXCEEDED


async def test_a_stream_with_a_timeout_may_be_read_inside_shorter_scopes(port):
    async with open_channel("127.0.0.1", port) as channel:
        replies = stub(channel).watch(HealthCheckRequest(), timeout=30)
        statuses: list[Serving] = []
        for _ in range(2):
            with trio.fail_after(5):
                statuses.append((await anext(replies)).status)
        with pytest.raises(StopAsyncIteration):
            await anext(replies)
    assert statuses == [Serving.SERVING, Serving.NOT_SERVING]


async def test_bytes_that_betterproto_cannot_decode_are_internal(port):
    class Strange(HealthCheckResponse):
        @classmethod
        def FromString(cls, s: bytes) -> "Strange":  # noqa: N802
            return super().FromString(s[:-1])

    async with open_channel("127.0.0.1", port) as channel:
        with pytest.raises(GRPCError, match="can't be decoded") as caught:
            await channel.unary("/grpc.health.v1.Health/Check", Strange, HealthCheckRequest())
    assert caught.value.status is Status.INTERNAL


async def test_the_channels_own_call_takes_the_same_messages(port):
    async with open_channel("127.0.0.1", port) as channel:
        reply = await channel.unary("/grpc.health.v1.Health/Check", HealthCheckResponse, HealthCheckRequest())
        assert reply.status is Serving.SERVING
        async with channel.request(
            "/grpc.health.v1.Health/Watch", Cardinality.UNARY_STREAM, HealthCheckRequest, HealthCheckResponse
        ) as stream:
            await stream.send_message(HealthCheckRequest(), end=True)
            assert len([reply async for reply in stream]) == 2
