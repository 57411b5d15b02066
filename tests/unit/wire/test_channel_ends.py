"""Leaving a channel, with calls open or in the middle of an error."""

import pytest
import trio
from h2.events import ConnectionTerminated
from trio.testing import wait_all_tasks_blocked

from core.wire.grpc import ChannelLimits, ConnectionLost, channel_over
from tests.unit.wire.callers import PATH, call
from tests.unit.wire.peer import channel_to
from tests.unit.wire.servers import Raw


async def test_leaving_the_channel_ends_its_calls_and_connections(network, nursery, autojump_clock):
    async with channel_to(network) as channel:
        outcome = call(nursery, channel)
        peer = await network.accept()
        await peer.request()
    await wait_all_tasks_blocked()
    assert isinstance(outcome.error, ConnectionLost)
    assert "the channel is closed" in (outcome.error.message or "")
    await peer.expect(ConnectionTerminated)
    await peer.read()
    assert peer.closed
    with pytest.raises(ConnectionLost, match="the channel is closed") as caught:
        await channel.unary(PATH, Raw, Raw(b""))
    assert not caught.value.sent


async def test_a_channel_whose_worker_reads_nothing_closes_in_time(nursery, autojump_clock):
    class Stuck(trio.abc.Stream):
        async def send_all(self, data: object) -> None:
            await trio.sleep_forever()

        async def wait_send_all_might_not_block(self) -> None:
            await trio.sleep_forever()

        async def receive_some(self, max_bytes: int | None = None) -> bytes:
            return await trio.sleep_forever()

        async def aclose(self) -> None:
            await trio.sleep_forever()

    async def connect() -> trio.abc.Stream:
        return Stuck()

    async with channel_over(connect, "stuck", limits=ChannelLimits(close_timeout=2)) as channel:
        call(nursery, channel)
        await wait_all_tasks_blocked()
    assert trio.current_time() <= 4 + 0.1


async def test_what_the_body_raises_leaves_the_channel_as_it_was(network):
    with pytest.raises(KeyError, match="mine"):
        async with channel_to(network):
            raise KeyError("mine")
