"""Calls that the worker has certainly not looked at are made again."""

import pytest
from h2.errors import ErrorCodes
from h2.events import ConnectionTerminated, DataReceived, RequestReceived
from trio.testing import wait_all_tasks_blocked

from core.wire.grpc import Cardinality, ConnectionLost
from core.wire.grpc.exchange import ATTEMPTS
from tests.unit.wire.callers import PATH, call
from tests.unit.wire.peer import Network, channel_to
from tests.unit.wire.servers import Raw


async def test_a_goaway_lets_running_calls_finish_and_moves_unprocessed_ones(network, nursery):
    async with channel_to(network) as channel:
        first, second = call(nursery, channel), call(nursery, channel)
        old = await network.accept()
        one, two = await old.request(), await old.request()
        await old.goaway(min(one, two))
        new = await network.accept()
        await new.reply(await new.request(), b"new")
        await old.reply(min(one, two), b"old")
        await wait_all_tasks_blocked()
        assert {first.reply, second.reply} == {b"old", b"new"}
        await old.expect(ConnectionTerminated)
        await old.read()
        assert old.closed
        assert channel.connections == 1


async def test_a_refused_stream_is_made_again_a_few_times(network, nursery, autojump_clock):
    async with channel_to(network) as channel:
        outcome = call(nursery, channel, b"payload")
        peer = await network.accept()
        for _ in range(ATTEMPTS):
            stream_id = await peer.request()
            assert (await peer.expect(DataReceived)).data == b"\0\0\0\0\x07payload"
            peer.h2.reset_stream(stream_id, ErrorCodes.REFUSED_STREAM)
            await peer.flush()
        await wait_all_tasks_blocked()
        assert isinstance(outcome.error, ConnectionLost)
        assert not outcome.error.sent


async def test_a_refused_client_stream_is_left_to_its_caller(network, nursery):
    async def worker() -> None:
        peer = await network.accept()
        stream_id = await peer.request()
        peer.h2.reset_stream(stream_id, ErrorCodes.REFUSED_STREAM)
        await peer.flush()

    nursery.start_soon(worker)
    async with channel_to(network) as channel, channel.request(PATH, Cardinality.STREAM_STREAM, Raw, Raw) as stream:
        await stream.send_message(Raw(b"1"))
        with pytest.raises(ConnectionLost) as caught:
            await stream.recv_message()
    assert not caught.value.sent


async def test_a_request_refused_while_it_is_sent_and_awaited_by_two_tasks_is_made_again_once(nursery, autojump_clock):
    network = Network(initial_window_size=100)
    body = bytes(range(256)) * 2
    async with channel_to(network) as channel, channel.request(PATH, Cardinality.UNARY_STREAM, Raw, Raw) as stream:
        nursery.start_soon(stream.send_message, Raw(body))
        old = await network.accept()
        old.ack = False
        await old.request()
        replies: list[Raw | None] = []

        async def receive() -> None:
            replies.append(await stream.recv_message())

        nursery.start_soon(receive)
        await wait_all_tasks_blocked()
        await old.goaway(0)
        new = await network.accept()
        stream_id = await new.request()
        got = b""
        while len(got) < len(body) + 5:
            got += (await new.expect(DataReceived)).data or b""
        assert got == b"\0" + len(body).to_bytes(4, "big") + body
        await new.reply(stream_id, b"once")
        await wait_all_tasks_blocked()
        assert replies == [b"once"]
        assert new.seen(RequestReceived) == []


async def test_a_request_refused_before_anybody_waits_is_made_again_when_somebody_does(network, nursery, autojump_clock):
    async with channel_to(network) as channel, channel.request(PATH, Cardinality.UNARY_UNARY, Raw, Raw) as stream:
        nursery.start_soon(stream.send_message, Raw(b"?"))
        old = await network.accept()
        await old.request()
        await old.goaway(0)
        await wait_all_tasks_blocked()

        async def worker() -> None:
            new = await network.accept()
            await new.reply(await new.request(), b"!")

        nursery.start_soon(worker)
        assert await stream.recv_message() == b"!"
