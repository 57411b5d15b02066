"""Connections that break, never come up, or go away: what their calls are told."""

import pytest
import trio
from h2.errors import ErrorCodes
from trio.testing import wait_all_tasks_blocked

from core.wire.grpc import ConnectionLost
from tests.unit.wire.callers import call
from tests.unit.wire.peer import channel_to


@pytest.mark.parametrize("answered", [False, True])
async def test_a_lost_connection_ends_its_calls_as_sent(network, nursery, answered):
    async with channel_to(network) as channel:
        outcome = call(nursery, channel)
        peer = await network.accept()
        stream_id = await peer.request()
        if answered:
            await peer.head(stream_id)
        await peer.close()
        await wait_all_tasks_blocked()
        assert isinstance(outcome.error, ConnectionLost)
        assert outcome.error.sent
        assert outcome.error.message == "worker:1: the worker closed the connection"
        assert channel.connections == 0


async def test_the_next_call_after_a_loss_connects_again(network, nursery):
    async with channel_to(network) as channel:
        call(nursery, channel)
        peer = await network.accept()
        await peer.request()
        await peer.close()
        await wait_all_tasks_blocked()
        outcome = call(nursery, channel)
        peer = await network.accept()
        await peer.reply(await peer.request(), b"back")
        await wait_all_tasks_blocked()
        assert outcome.reply == b"back"


async def test_garbage_from_the_worker_ends_calls_and_says_why(network, nursery):
    async with channel_to(network) as channel:
        outcome = call(nursery, channel)
        peer = await network.accept()
        await peer.request()
        await peer.raw(b"\x00\x00\x08\x00" + b"HTTP/1.1 500 oops")
        await wait_all_tasks_blocked()
        assert isinstance(outcome.error, ConnectionLost)
        assert "broke HTTP/2" in (outcome.error.message or "")


async def test_a_peer_that_speaks_no_http2_fails_the_attempt(network, nursery):
    async with channel_to(network) as channel:
        outcome = call(nursery, channel)
        peer = await network.accept_silently()
        await peer.stream.send_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await wait_all_tasks_blocked()
        assert isinstance(outcome.error, ConnectionLost)
        assert not outcome.error.sent
        assert "HTTP/2" in (outcome.error.message or "")


async def test_a_peer_that_says_nothing_fails_the_attempt_in_time(network, nursery, autojump_clock):
    async with channel_to(network, connect_timeout=3) as channel:
        outcome = call(nursery, channel)
        await network.accept_silently()
        await trio.sleep(4)
        assert outcome.at == pytest.approx(3)
        assert isinstance(outcome.error, ConnectionLost)
        assert "no HTTP/2 settings within 3 s (connect_timeout)" in (outcome.error.message or "")


async def test_calls_killed_for_going_too_fast_say_so(network, nursery):
    async with channel_to(network) as channel:
        outcome = call(nursery, channel)
        peer = await network.accept()
        stream_id = await peer.request()
        await peer.goaway(stream_id, ErrorCodes.ENHANCE_YOUR_CALM, b"too_many_resets")
        await peer.close()
        await wait_all_tasks_blocked()
        assert isinstance(outcome.error, ConnectionLost)
        assert outcome.error.sent
        assert "ENHANCE_YOUR_CALM (too_many_resets)" in (outcome.error.message or "")
