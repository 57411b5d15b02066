"""Many calls with everything going wrong at random: afterwards nothing is left of them."""

import contextlib
import gc
import random

import pytest
import trio
from h2.errors import ErrorCodes
from h2.events import RequestReceived
from h2.exceptions import ProtocolError

from core.wire.grpc import Cardinality, Channel, GRPCError
from core.wire.grpc.exchange import Exchange
from tests.unit.wire.callers import PATH
from tests.unit.wire.peer import HEAD, Network, Peer, channel_to
from tests.unit.wire.servers import Raw


async def misbehave(peer: Peer, dice: random.Random) -> None:
    """A worker that answers, errs, resets, refuses, says nothing, shuts down or breaks, for a while."""
    while True:
        stream_id = (await peer.expect(RequestReceived)).stream_id
        with contextlib.suppress(ProtocolError):  # the client was faster to reset it, or says goodbye
            match dice.randrange(12):
                case 0:
                    peer.h2.reset_stream(stream_id, dice.choice([ErrorCodes.CANCEL, ErrorCodes.REFUSED_STREAM]))
                case 1:
                    peer.h2.send_headers(stream_id, [*HEAD, ("grpc-status", "14")], end_stream=True)
                case 2:
                    peer.h2.send_headers(stream_id, HEAD)
                    peer.h2.send_data(stream_id, b"garbage")
                case 3:
                    pass
                case 4 if dice.random() < 0.3:
                    await peer.goaway(max(stream_id - 6, 0))
                case 5 if dice.random() < 0.3:
                    return await peer.close()
                case 6 if dice.random() < 0.3:
                    return await peer.raw(b"\xff" * 20)
                case _:
                    await peer.reply(stream_id, *[b"x"] * dice.randrange(1, 4))
        await peer.flush()


async def one_call(channel: Channel, dice: random.Random) -> None:
    with trio.move_on_after(dice.choice([0, 0.01, 1, 30])):
        try:
            if dice.random() < 0.5:
                await channel.unary(PATH, Raw, Raw(bytes(dice.randrange(300))), timeout=dice.choice([None, 0.5, 20]))
            else:
                async with channel.request(PATH, Cardinality.UNARY_STREAM, Raw, Raw) as stream:
                    await stream.send_message(Raw(bytes(dice.randrange(300))))
                    async for _ in stream:
                        if dice.random() < 0.2:
                            break
        except GRPCError:
            pass


@pytest.mark.parametrize("seed", range(6))
async def test_nothing_is_left_of_calls_however_they_ended(seed, autojump_clock):
    dice = random.Random(seed)
    network = Network(max_concurrent_streams=20, initial_window_size=100)
    limits = {"streams_per_connection": 10, "max_connections": 3, "reconnect_delay": 0.01}
    async with trio.open_nursery() as workers:

        async def serve(peer: Peer) -> None:
            # The client may be faster to close the connection.
            with contextlib.suppress(AssertionError, trio.BrokenResourceError, trio.ClosedResourceError):
                await misbehave(peer, dice)

        async def accept() -> None:
            while True:
                workers.start_soon(serve, await network.accept())

        workers.start_soon(accept)
        async with channel_to(network, **limits) as channel:
            async with trio.open_nursery() as callers:
                for _ in range(400):
                    callers.start_soon(one_call, channel, dice)
                    if dice.random() < 0.1:
                        await trio.sleep(dice.random())
            assert channel.calls == 0
            gc.collect()
            assert [thing for thing in gc.get_objects() if isinstance(thing, Exchange)] == []
        assert channel.connections == 0
        workers.cancel_scope.cancel()
