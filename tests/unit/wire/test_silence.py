"""Workers that say nothing, connections that do nothing."""

import pytest
import trio
from h2.errors import ErrorCodes
from h2.events import ConnectionTerminated, PingReceived
from trio.testing import wait_all_tasks_blocked

from core.wire.grpc import ConnectionLost
from tests.unit.wire.callers import call
from tests.unit.wire.peer import channel_to


async def test_silence_with_open_calls_is_asked_about_and_then_ends_the_connection(network, nursery, autojump_clock):
    async with channel_to(network, keepalive_interval=10, keepalive_timeout=5) as channel:
        outcome = call(nursery, channel)
        peer = await network.accept()
        await peer.request()
        begun = trio.current_time()
        await trio.sleep(20)
        assert outcome.at - begun == pytest.approx(15)
        assert isinstance(outcome.error, ConnectionLost)
        assert "no answer to a PING within 5 s (keepalive_timeout)" in (outcome.error.message or "")


async def test_an_answered_ping_keeps_the_call(network, nursery, autojump_clock):
    async with channel_to(network, keepalive_interval=10, keepalive_timeout=5) as channel:
        outcome = call(nursery, channel)
        peer = await network.accept()
        stream_id = await peer.request()
        with trio.move_on_after(100):
            while True:
                await peer.expect(PingReceived)
        assert not outcome.over
        await peer.reply(stream_id, b"at last")
        await wait_all_tasks_blocked()
        assert outcome.reply == b"at last"


async def test_a_worker_that_finds_pings_too_many_gets_half_as_many(network, nursery, autojump_clock):
    async with channel_to(network, keepalive_interval=10, keepalive_timeout=5) as channel:
        call(nursery, channel)
        peer = await network.accept()
        stream_id = await peer.request()
        await peer.expect(PingReceived)
        await peer.goaway(stream_id, ErrorCodes.ENHANCE_YOUR_CALM, b"too_many_pings")
        await peer.close()
        await wait_all_tasks_blocked()
        call(nursery, channel)
        peer = await network.accept()
        await peer.request()
        begun = trio.current_time()
        await peer.expect(PingReceived)
        assert trio.current_time() - begun == pytest.approx(20)


async def test_there_are_no_pings_without_calls(network, nursery, autojump_clock):
    async with channel_to(network, keepalive_interval=10, idle_timeout=1000) as channel:
        call(nursery, channel)
        peer = await network.accept()
        await peer.reply(await peer.request(), b"")
        with trio.move_on_after(500):
            await peer.expect(PingReceived)
            raise AssertionError("a PING came on an idle connection")
        assert channel.connections == 1


async def test_an_idle_connection_is_closed_with_a_goaway(network, nursery, autojump_clock):
    async with channel_to(network, idle_timeout=30) as channel:
        call(nursery, channel)
        peer = await network.accept()
        await peer.reply(await peer.request(), b"")
        begun = trio.current_time()
        await peer.expect(ConnectionTerminated)
        assert trio.current_time() - begun == pytest.approx(30)
        await wait_all_tasks_blocked()
        assert channel.connections == 0
