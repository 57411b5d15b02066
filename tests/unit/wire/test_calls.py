"""Calls of every shape against a real server (grpcio's)."""

from typing import Any

import grpc
import pytest

from core.wire.grpc import Cardinality, ConnectionLost, GRPCError, Status, open_channel
from tests.unit.wire.servers import ECHO, Raw, grpcio_server, unary


@pytest.fixture(scope="module")
def port():
    def metadata(_: bytes, context: grpc.ServicerContext) -> bytes:
        got: dict[str, Any] = dict(context.invocation_metadata())
        context.send_initial_metadata((("early", "1"),))
        context.set_trailing_metadata((("late", "2"), ("late-bin", got["data-bin"])))
        return got["who"].encode()

    def fail(request: bytes, context: grpc.ServicerContext) -> bytes:
        context.set_trailing_metadata((("grpc-status-details-bin", b"\0details"), ("why", "test")))
        context.abort(grpc.StatusCode.NOT_FOUND, request.decode())

    methods = {**ECHO, "Metadata": unary(metadata), "Fail": unary(fail)}
    with grpcio_server(methods) as server:
        yield server.port


async def test_a_unary_call_brings_the_reply(port):
    async with open_channel("127.0.0.1", port) as channel:
        assert await channel.unary("/test.Test/Echo", Raw, Raw(b"hello")) == b"hello"
        assert await channel.unary("/test.Test/Echo", Raw, Raw(b"")) == b""


async def test_a_server_stream_brings_every_message_and_then_none(port):
    async with (
        open_channel("127.0.0.1", port) as channel,
        channel.request("/test.Test/Repeat", Cardinality.UNARY_STREAM, Raw, Raw) as stream,
    ):
        await stream.send_message(Raw(b"300"), end=True)
        assert [message async for message in stream] == [b"300"] * 300
        assert await stream.recv_message() is None
        assert await stream.recv_messages() == []


async def test_recv_messages_takes_whatever_has_come(port):
    async with (
        open_channel("127.0.0.1", port) as channel,
        channel.request("/test.Test/Repeat", Cardinality.UNARY_STREAM, Raw, Raw) as stream,
    ):
        await stream.send_message(Raw(b"300"), end=True)
        batches = []
        while batch := await stream.recv_messages():
            batches.append(batch)
    assert sum(map(len, batches)) == 300


async def test_a_client_stream_sends_until_its_end(port):
    async with (
        open_channel("127.0.0.1", port) as channel,
        channel.request("/test.Test/Join", Cardinality.STREAM_UNARY, Raw, Raw) as stream,
    ):
        await stream.send_message(Raw(b"a"))
        await stream.send_message(Raw(b"b"))
        await stream.end()
        assert await stream.recv_message() == b"ab"
        assert await stream.recv_message() is None


async def test_a_client_stream_may_have_no_messages(port):
    async with (
        open_channel("127.0.0.1", port) as channel,
        channel.request("/test.Test/Join", Cardinality.STREAM_UNARY, Raw, Raw) as stream,
    ):
        await stream.send_request(end=True)
        assert await stream.recv_message() == b""


async def test_both_sides_may_stream_in_turns(port):
    async with (
        open_channel("127.0.0.1", port) as channel,
        channel.request("/test.Test/Both", Cardinality.STREAM_STREAM, Raw, Raw) as stream,
    ):
        for text in (b"one", b"two"):
            await stream.send_message(Raw(text))
            assert await stream.recv_message() == text
        await stream.end()
        assert await stream.recv_message() is None


async def test_metadata_goes_both_ways_also_as_bytes(port):
    async with (
        open_channel("127.0.0.1", port) as channel,
        channel.request(
            "/test.Test/Metadata",
            Cardinality.UNARY_UNARY,
            Raw,
            Raw,
            metadata={"who": "me", "data-bin": b"\0\xff"},
        ) as stream,
    ):
        await stream.send_message(Raw(b""), end=True)
        await stream.recv_initial_metadata()
        assert stream.initial_metadata is not None
        assert stream.initial_metadata["early"] == "1"
        assert await stream.recv_message() == b"me"
        await stream.recv_trailing_metadata()
        assert stream.trailing_metadata is not None
        assert dict(stream.trailing_metadata) == {"late": "2", "late-bin": b"\0\xff"}


async def test_metadata_that_cannot_be_sent_is_refused_before_anything_is_sent(port):
    async with open_channel("127.0.0.1", port) as channel:
        with pytest.raises(ValueError, match="Invalid metadata key"):
            channel.request("/test.Test/Echo", Cardinality.UNARY_UNARY, Raw, Raw, metadata={"grpc-x": "1"})
        assert channel.connections == 0


async def test_an_error_status_is_raised_with_its_text_and_details(port):
    async with open_channel("127.0.0.1", port) as channel:
        with pytest.raises(GRPCError) as caught:
            await channel.unary("/test.Test/Fail", Raw, Raw("100 % gone: é\n".encode()))
    assert caught.value.status is Status.NOT_FOUND
    assert caught.value.message == "100 % gone: é\n"
    assert caught.value.details == b"\0details"


async def test_the_trailers_of_a_failed_call_can_be_read(port):
    async with (
        open_channel("127.0.0.1", port) as channel,
        channel.request("/test.Test/Fail", Cardinality.UNARY_UNARY, Raw, Raw) as stream,
    ):
        await stream.send_message(Raw(b"no"), end=True)
        with pytest.raises(GRPCError):
            await stream.recv_message()
        assert stream.trailing_metadata is not None
        assert stream.trailing_metadata["why"] == "test"


async def test_an_unknown_method_is_unimplemented(port):
    async with open_channel("127.0.0.1", port) as channel:
        with pytest.raises(GRPCError) as caught:
            await channel.unary("/test.Test/Nothing", Raw, Raw(b""))
    assert caught.value.status is Status.UNIMPLEMENTED


async def test_nothing_is_connected_before_the_first_call(port):
    async with open_channel("127.0.0.1", port) as channel:
        assert channel.connections == 0
        await channel.unary("/test.Test/Echo", Raw, Raw(b""))
        assert channel.connections == 1


async def test_64_mib_go_both_ways(port):
    message = Raw(bytes(64 * 2**20))
    async with open_channel("127.0.0.1", port) as channel:
        assert await channel.unary("/test.Test/Echo", Raw, message) == message


async def test_a_refused_connection_says_that_nothing_was_sent(port):
    with pytest.raises(ConnectionLost, match=r"127\.0\.0\.1:1: .*refused") as caught:
        async with open_channel("127.0.0.1", 1) as channel:
            await channel.unary("/test.Test/Echo", Raw, Raw(b""))
    assert caught.value.sent is False
    assert caught.value.status is Status.UNAVAILABLE
