"""What is sent, together or in pieces, and when sending has to wait."""

import pytest
import trio
from h2.events import DataReceived, RequestReceived
from trio.testing import wait_all_tasks_blocked

from core.wire.grpc import GRPCError, Status
from tests.unit.wire.callers import PATH, call
from tests.unit.wire.peer import HEAD, Network, channel_to
from tests.unit.wire.servers import Raw


async def test_calls_of_one_tick_share_one_write(network, nursery):
    async with channel_to(network) as channel:
        call(nursery, channel)
        peer = await network.accept()
        await peer.reply(await peer.request(), b"warm")
        await wait_all_tasks_blocked()
        writes = peer.writes
        for _ in range(20):
            call(nursery, channel)
        await wait_all_tasks_blocked()
        assert peer.writes == writes + 1
        await peer.read()
        assert len(peer.seen(RequestReceived)) == 20


async def test_sending_waits_for_the_window(nursery):
    network = Network(initial_window_size=100)
    async with channel_to(network) as channel:
        outcome = call(nursery, channel, b"x" * 1000)
        peer = await network.accept()
        peer.ack = False
        stream_id = await peer.request()
        await peer.expect(DataReceived)
        await wait_all_tasks_blocked()
        peer.h2.increment_flow_control_window(905, stream_id)
        await peer.flush()
        event = await peer.expect(DataReceived)
        assert event.stream_ended is not None
        await peer.reply(stream_id, b"got it")
        await wait_all_tasks_blocked()
        assert outcome.reply == b"got it"


async def test_a_sender_that_waits_for_the_window_can_be_cancelled(nursery):
    network = Network(initial_window_size=100)
    async with channel_to(network) as channel:
        async with trio.open_nursery() as callers:
            call(callers, channel, b"x" * 1000)
            peer = await network.accept()
            await peer.request()
            await wait_all_tasks_blocked()
            callers.cancel_scope.cancel()
        await peer.reset()
        outcome = call(nursery, channel, b"x")
        await peer.reply(await peer.request(), b"next")
        await wait_all_tasks_blocked()
        assert outcome.reply == b"next"


async def test_an_error_reply_ends_a_sender_that_waits_for_the_window(nursery):
    network = Network(initial_window_size=100)
    async with channel_to(network) as channel:
        outcome = call(nursery, channel, b"x" * 1000)
        peer = await network.accept()
        peer.ack = False
        stream_id = await peer.request()
        peer.h2.send_headers(stream_id, [*HEAD, ("grpc-status", "11"), ("grpc-message", "big")], end_stream=True)
        await peer.flush()
        await wait_all_tasks_blocked()
        assert outcome.error is not None
        assert outcome.error.status is Status.OUT_OF_RANGE


async def test_a_message_over_the_limit_is_not_sent(network):
    async with channel_to(network, max_message_bytes=10) as channel:
        with pytest.raises(GRPCError, match=r"11 bytes is over the limit of 10 .*; it was not sent"):
            await channel.unary(PATH, Raw, Raw(bytes(11)))
    assert network.attempts == []
