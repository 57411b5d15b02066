"""Waiting until the worker has read the cancellations."""

import trio
from h2.events import PingReceived, StreamReset
from trio.testing import wait_all_tasks_blocked

from core.wire.grpc import Channel
from tests.unit.wire.callers import call
from tests.unit.wire.peer import Network, Peer, channel_to


async def give_up_a_call(network: Network, channel: Channel) -> Peer:
    async with trio.open_nursery() as calls:
        call(calls, channel)
        peer = await network.accept()
        await peer.request()
        calls.cancel_scope.cancel()
    return peer


async def test_settling_waits_until_the_worker_has_read_the_cancellations(network, nursery):
    async with channel_to(network) as channel:
        peer = await give_up_a_call(network, channel)
        settled = trio.Event()

        async def settle() -> None:
            await channel.settle()
            settled.set()

        nursery.start_soon(settle)
        await wait_all_tasks_blocked()
        assert not settled.is_set()
        await peer.expect(StreamReset)
        await peer.expect(PingReceived)
        await settled.wait()


async def test_nothing_is_asked_when_nothing_was_cancelled(network, nursery):
    async with channel_to(network) as channel:
        call(nursery, channel)
        peer = await network.accept()
        await peer.request()
        await channel.settle()
        await wait_all_tasks_blocked()
        assert peer.seen(PingReceived) == []
        nursery.cancel_scope.cancel()


async def test_a_connection_that_is_lost_is_settled(network, nursery):
    async with channel_to(network) as channel, trio.open_nursery() as settling:
        peer = await give_up_a_call(network, channel)
        settling.start_soon(channel.settle)
        await wait_all_tasks_blocked()
        await peer.close()
