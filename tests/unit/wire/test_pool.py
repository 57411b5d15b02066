"""Which connection a call gets, when another is opened, who waits and for how long."""

from itertools import pairwise

import pytest
import trio
from h2.events import ConnectionTerminated, RequestReceived
from h2.settings import SettingCodes
from trio.testing import wait_all_tasks_blocked

from core.wire.grpc import Cardinality, ConnectionLost, GRPCError, Status
from tests.unit.wire.callers import PATH, call
from tests.unit.wire.peer import Network, Peer, channel_to
from tests.unit.wire.servers import Raw


async def test_another_connection_is_opened_when_one_is_full(nursery):
    network = Network()
    async with channel_to(network, streams_per_connection=2) as channel:
        for _ in range(5):
            call(nursery, channel)
        peers = [await network.accept() for _ in range(3)]
        await wait_all_tasks_blocked()
        for peer in peers:
            await peer.read()
        assert sorted(len(peer.seen(RequestReceived)) for peer in peers) == [1, 2, 2]
        assert len(network.attempts) == 3


async def test_a_connection_that_has_carried_enough_calls_gives_way_to_a_new_one(nursery):
    network = Network()
    async with channel_to(network, calls_per_connection=2) as channel:
        for _ in range(3):
            for _ in range(2):
                call(nursery, channel)
            peer = await network.accept()
            for _ in range(2):
                await peer.reply(await peer.request(), b"")
            await wait_all_tasks_blocked()
            await peer.read()
            assert peer.seen(ConnectionTerminated)
        assert (channel.calls, channel.connections) == (0, 0)


async def test_a_call_goes_to_the_least_loaded_connection(nursery):
    network = Network()
    async with channel_to(network, streams_per_connection=2) as channel:
        for _ in range(4):
            call(nursery, channel)
        first, second = await network.accept(), await network.accept()
        await wait_all_tasks_blocked()
        for _ in range(2):
            await second.reply(await second.request(), b"")
        await first.reply(await first.request(), b"")
        await wait_all_tasks_blocked()
        call(nursery, channel)
        await second.request()


async def test_calls_go_on_top_when_there_cannot_be_another_connection(nursery):
    network = Network()
    async with channel_to(network, streams_per_connection=2, max_connections=1) as channel:
        for _ in range(5):
            call(nursery, channel)
        peer = await network.accept()
        await wait_all_tasks_blocked()
        await peer.read()
        assert len(peer.seen(RequestReceived)) == 5


async def test_calls_go_on_top_while_another_connection_cannot_be_had(nursery):
    network = Network()
    async with channel_to(network, streams_per_connection=1) as channel:
        call(nursery, channel)
        peer = await network.accept()
        await peer.request()
        network.refuse = True
        call(nursery, channel)
        await peer.request()
        assert len(network.attempts) == 2


async def test_calls_over_the_workers_stream_limit_wait_in_order(nursery):
    network = Network(max_concurrent_streams=1)
    async with channel_to(network, max_connections=1) as channel:
        outcomes = [call(nursery, channel, b"warm")]
        peer = await network.accept()
        stream_id = await peer.request()
        for index in range(3):
            outcomes.append(call(nursery, channel, b"%d" % index))
            await wait_all_tasks_blocked()
        for index in range(4):
            await peer.reply(stream_id, b"reply %d" % index)
            if index < 3:
                stream_id = await peer.request()
        await wait_all_tasks_blocked()
        assert [outcome.reply for outcome in outcomes] == [b"reply %d" % index for index in range(4)]


async def test_a_waiting_call_that_is_cancelled_leaves_its_place(nursery):
    network = Network(max_concurrent_streams=1)
    async with channel_to(network, max_connections=1) as channel:
        call(nursery, channel)
        peer = await network.accept()
        stream_id = await peer.request()
        async with trio.open_nursery() as callers:
            call(callers, channel)
            await wait_all_tasks_blocked()
            last = call(nursery, channel)
            await wait_all_tasks_blocked()
            callers.cancel_scope.cancel()
        await peer.reply(stream_id, b"")
        await peer.reply(await peer.request(), b"last")
        await wait_all_tasks_blocked()
        assert last.reply == b"last"


async def test_a_raised_stream_limit_lets_waiting_calls_go(nursery):
    network = Network(max_concurrent_streams=1)
    async with channel_to(network, max_connections=1) as channel:
        for _ in range(3):
            call(nursery, channel)
        peer = await network.accept()
        await peer.request()
        await wait_all_tasks_blocked()
        peer.h2.update_settings({SettingCodes.MAX_CONCURRENT_STREAMS: 10})
        await peer.flush()
        await peer.request()
        await peer.request()


async def test_a_deadline_ends_a_call_that_waits_for_a_stream(nursery, autojump_clock):
    network = Network(max_concurrent_streams=1)
    async with channel_to(network, max_connections=1) as channel:
        call(nursery, channel)
        peer = await network.accept()
        await peer.request()
        with pytest.raises(GRPCError) as caught:
            await channel.unary(PATH, Raw, Raw(b""), timeout=3)
        assert caught.value.status is Status.DEADLINE_EXCEEDED
        await wait_all_tasks_blocked()
        await peer.flush()
        assert peer.seen(RequestReceived) == []


async def test_attempts_to_connect_back_off_and_calls_share_their_outcome(nursery, autojump_clock):
    network = Network()
    network.refuse = True
    async with channel_to(network, reconnect_delay=1, reconnect_delay_max=4, connect_timeout=10) as channel:
        for _ in range(6):
            async with trio.open_nursery() as callers:
                outcomes = [call(callers, channel) for _ in range(3)]
            assert all(isinstance(outcome.error, ConnectionLost) for outcome in outcomes)
            assert len({outcome.at for outcome in outcomes}) == 1
    waits = [later - earlier for earlier, later in pairwise(network.attempts)]
    assert len(waits) == 5
    for wait, expected in zip(waits, [1, 2, 4, 4, 4], strict=True):
        assert 0.8 * expected <= wait <= 1.2 * expected


async def test_a_call_made_during_back_off_goes_through_once_the_worker_is_back(nursery, autojump_clock):
    network = Network()
    network.refuse = True
    async with channel_to(network, reconnect_delay=2) as channel:
        with pytest.raises(ConnectionLost):
            await channel.unary(PATH, Raw, Raw(b""))
        network.refuse = False
        outcome = call(nursery, channel)
        peer = await network.accept()
        await peer.reply(await peer.request(), b"back")
        await wait_all_tasks_blocked()
        assert outcome.reply == b"back"
        assert trio.current_time() >= 1.6


async def test_a_success_ends_the_back_off(nursery, autojump_clock):
    network = Network()
    async with channel_to(network, reconnect_delay=5, reconnect_delay_max=5) as channel:
        network.refuse = True
        with pytest.raises(ConnectionLost):
            await channel.unary(PATH, Raw, Raw(b""))
        network.refuse = False
        call(nursery, channel)
        peer = await network.accept()
        await peer.request()
        await peer.close()
        await wait_all_tasks_blocked()
        begun = trio.current_time()
        call(nursery, channel)
        await (await network.accept()).request()
        assert trio.current_time() == begun


async def test_a_burst_of_cancelled_calls_moves_new_ones_to_another_connection(nursery):
    network = Network()
    async with channel_to(network) as channel:
        async with trio.open_nursery() as callers:
            for _ in range(50):
                call(callers, channel)
            first = await network.accept()
            await wait_all_tasks_blocked()
            callers.cancel_scope.cancel()
        outcome = call(nursery, channel)
        second = await network.accept()
        await second.reply(await second.request(), b"elsewhere")
        await wait_all_tasks_blocked()
        assert outcome.reply == b"elsewhere"
        await first.read()  # and answers
        await wait_all_tasks_blocked()
        call(nursery, channel)
        await wait_all_tasks_blocked()
        assert channel.connections == 2


async def test_streams_of_one_connection_do_not_wait_for_one_that_nobody_reads(nursery):
    network = Network()
    async with channel_to(network, stream_window=100_000, connection_window=100_000) as channel:

        async def stall(started: trio.Event) -> None:
            async with channel.request(PATH, Cardinality.UNARY_STREAM, Raw, Raw) as stream:
                await stream.send_message(Raw(b"?"))
                started.set()
                await trio.sleep_forever()

        started = trio.Event()
        async with trio.open_nursery() as callers:
            callers.start_soon(stall, started)
            peer: Peer = await network.accept()
            stalled = await peer.request()
            await peer.head(stalled)
            for _ in range(6):
                await peer.message(stalled, bytes(16_000))
            outcome = call(nursery, channel)
            other = await peer.request()
            await peer.head(other)
            while peer.h2.local_flow_control_window(other) < 60_000:
                await peer.read()
            await peer.message(other, bytes(10))
            await peer.trailers(other)
            await wait_all_tasks_blocked()
            assert outcome.reply == bytes(10)
            callers.cancel_scope.cancel()
