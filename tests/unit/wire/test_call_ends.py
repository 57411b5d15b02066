"""How calls end, and what of it the worker sees: over memory streams, on the virtual clock."""

import pytest
import trio
from grpclib.exceptions import ProtocolError
from h2.errors import ErrorCodes
from h2.events import RequestReceived, StreamReset
from trio.testing import wait_all_tasks_blocked

from core.wire.grpc import Cardinality, ConnectionLost, GRPCError, Status
from tests.unit.wire.callers import PATH, call
from tests.unit.wire.peer import HEAD, Peer, channel_to
from tests.unit.wire.servers import Raw


async def test_a_deadline_ends_the_call_here_and_at_the_worker(network, nursery, autojump_clock):
    async with channel_to(network) as channel:
        outcome = call(nursery, channel, timeout=7)
        peer = await network.accept()
        request = await peer.expect(RequestReceived)
        assert dict(request.headers or ())["grpc-timeout"] == "7000m"
        event = await peer.reset()
        assert event.error_code is ErrorCodes.CANCEL
        assert trio.current_time() == pytest.approx(7)
        await wait_all_tasks_blocked()
        assert outcome.error is not None
        assert outcome.error.status is Status.DEADLINE_EXCEEDED


async def test_a_deadline_holds_while_there_is_no_connection(network, nursery, autojump_clock):
    async with channel_to(network) as channel:
        outcome = call(nursery, channel, timeout=2)
        await network.accept_silently()
        await trio.sleep(3)
        assert outcome.error is not None
        assert outcome.error.status is Status.DEADLINE_EXCEEDED
        assert outcome.at == pytest.approx(2)


async def test_a_deadline_that_has_passed_sends_nothing(network):
    async with channel_to(network) as channel:
        with pytest.raises(GRPCError) as caught:
            await channel.unary(PATH, Raw, Raw(b""), timeout=0)
    assert caught.value.status is Status.DEADLINE_EXCEEDED
    assert network.attempts == []


async def test_deadlines_of_many_calls_expire_each_at_its_time(network, nursery, autojump_clock):
    async with channel_to(network) as channel:
        outcomes = [call(nursery, channel, timeout=timeout) for timeout in (5, 1, 3, 4, 2)]
        await network.accept()
        await trio.sleep(10)
        assert [round(outcome.at) for outcome in outcomes] == [5, 1, 3, 4, 2]


async def test_cancelling_a_caller_resets_the_stream_at_once(network, nursery):
    async with channel_to(network) as channel:
        async with trio.open_nursery() as callers:
            call(callers, channel)
            peer = await network.accept()
            await peer.request()
            callers.cancel_scope.cancel()
        await wait_all_tasks_blocked()
        await peer.read()
        (event,) = peer.seen(StreamReset)
        assert event.error_code is ErrorCodes.CANCEL


async def test_leaving_a_stream_early_resets_it(network, nursery):
    peers: list[Peer] = []

    async def worker() -> None:
        peer = await network.accept()
        peers.append(peer)
        stream_id = await peer.request()
        await peer.head(stream_id)
        await peer.message(stream_id, b"1", b"2")

    async with channel_to(network) as channel:
        nursery.start_soon(worker)
        async with channel.request(PATH, Cardinality.UNARY_STREAM, Raw, Raw) as stream:
            await stream.send_message(Raw(b"?"), end=True)
            assert await stream.recv_message() == b"1"
        assert channel.calls == 0
        await peers[0].reset()


async def test_cancel_wakes_whoever_receives_and_can_be_repeated(network, nursery):
    async with channel_to(network) as channel:
        async with channel.request(PATH, Cardinality.UNARY_STREAM, Raw, Raw) as stream:
            errors: list[GRPCError] = []

            async def receive() -> None:
                try:
                    await stream.recv_message()
                except GRPCError as error:
                    errors.append(error)

            async def begin() -> None:
                await stream.send_message(Raw(b"?"), end=True)
                await receive()

            nursery.start_soon(begin)
            peer = await network.accept()
            await peer.request()
            stream.cancel()
            await stream.cancel()
            await wait_all_tasks_blocked()
            assert [error.status for error in errors] == [Status.CANCELLED]
            await peer.reset()
        await wait_all_tasks_blocked()
        assert peer.seen(StreamReset) == []


async def test_a_cancel_after_the_end_sends_nothing(network, nursery):
    async with channel_to(network) as channel:
        outcome = call(nursery, channel)
        peer = await network.accept()
        await peer.reply(await peer.request(), b"done")
        await wait_all_tasks_blocked()
        assert outcome.reply == b"done"
        async with channel.request(PATH, Cardinality.UNARY_UNARY, Raw, Raw) as stream:

            async def worker() -> None:
                await peer.reply(await peer.request(), b"again")

            nursery.start_soon(worker)
            await stream.send_message(Raw(b""))
            assert await stream.recv_message() == b"again"
            stream.cancel()
        await wait_all_tasks_blocked()
    while not peer.closed:
        await peer.read()
    assert peer.seen(StreamReset) == []


async def test_messages_that_came_before_an_error_are_handed_out_first(network, nursery):
    async def worker() -> None:
        peer = await network.accept()
        stream_id = await peer.request()
        peer.h2.send_headers(stream_id, HEAD)
        await peer.message(stream_id, b"1", b"2")
        await peer.trailers(stream_id, [("grpc-status", "14"), ("grpc-message", "paused")])

    nursery.start_soon(worker)
    async with channel_to(network) as channel, channel.request(PATH, Cardinality.UNARY_STREAM, Raw, Raw) as stream:
        await stream.send_message(Raw(b"?"), end=True)
        await wait_all_tasks_blocked()
        assert await stream.recv_messages() == [b"1", b"2"]
        with pytest.raises(GRPCError, match="paused") as caught:
            await stream.recv_messages()
    assert not isinstance(caught.value, ConnectionLost)
    assert caught.value.status is Status.UNAVAILABLE


@pytest.mark.parametrize("messages", [[], [b"1", b"2"]])
async def test_a_unary_call_wants_exactly_one_message(network, nursery, messages):
    async with channel_to(network) as channel:
        outcome = call(nursery, channel)
        peer = await network.accept()
        stream_id = await peer.request()
        await peer.head(stream_id)
        await peer.message(stream_id, *messages)
        if not messages:
            await peer.trailers(stream_id)
        await wait_all_tasks_blocked()
        assert outcome.error is not None
        assert outcome.error.status is Status.INTERNAL
        assert "message" in (outcome.error.message or "")


async def test_a_reply_that_cannot_be_decoded_is_internal(network, nursery):
    class Strict(Raw):
        @classmethod
        def FromString(cls, data: bytes) -> "Strict":  # noqa: N802
            raise ValueError("wrong wire type")

    async def worker() -> None:
        peer = await network.accept()
        await peer.reply(await peer.request(), b"xyz")

    nursery.start_soon(worker)
    async with channel_to(network) as channel:
        with pytest.raises(GRPCError, match="the reply is no Strict: 3 bytes") as caught:
            await channel.unary(PATH, Strict, Raw(b""))
    assert caught.value.status is Status.INTERNAL


async def test_methods_out_of_turn_are_refused(network):
    async with channel_to(network) as channel, channel.request(PATH, Cardinality.UNARY_UNARY, Raw, Raw) as stream:
        with pytest.raises(ProtocolError, match="not sent yet"):
            await stream.recv_message()
        with pytest.raises(ProtocolError, match="needs a message"):
            await stream.send_request(end=True)
        with pytest.raises(ProtocolError, match="not sent yet"):
            await stream.end()
