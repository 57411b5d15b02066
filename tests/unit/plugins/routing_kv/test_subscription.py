"""Following a publisher over real sockets: every batch once and in order, whatever is lost on the way."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
import trio
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import wait_all_tasks_blocked

from plugins.routing_kv import subscription as subscription_module
from plugins.routing_kv.events import Cleared, Event, Removed, Stored
from plugins.routing_kv.feed import Feed
from plugins.routing_kv.index import Holder, Index
from plugins.routing_kv.sockets import Socket
from plugins.routing_kv.sources import Source
from plugins.routing_kv.subscription import Subscription
from tests.unit.plugins.routing_kv.publisher import Addresses, Publisher, publishing
from tests.workers.processes import free_ports


def block(number: int) -> Stored:
    """A prompt of one block, whose hash is its number."""
    return Stored([number], [number], 1, medium="GPU")


class WatchedFeed(Feed):
    """A feed whose changes can be waited for."""

    def __init__(self, holder: Holder) -> None:
        self.changed = trio.Event()
        super().__init__(holder)

    def apply(self, event: Event) -> None:
        super().apply(event)
        self.changed.set()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "whole":
            self.changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        with trio.fail_after(20):
            while not condition():
                self.changed = trio.Event()
                await self.changed.wait()


class Follower:
    """A subscription with a context and a feed of its own."""

    def __init__(self, context, source: Source) -> None:
        self.feed = WatchedFeed(Index(10_000).holder())
        #: Calls that have left the engine.
        self.ended = 0
        self.subscription = Subscription(context, source, self.feed, worker="w", ended=lambda: self.ended)
        self.counters = self.subscription.counters

    def blocks(self) -> set[int]:
        return {number for number in range(200) if self.feed.holder.find(number) is not None}

    async def until(self, *blocks: int) -> None:
        """Wait until it has these blocks and no others."""
        await self.feed.until(lambda: self.blocks() == set(blocks))


@asynccontextmanager
async def following(addresses: Addresses, topic: str = "", *, replay: bool = True, binds: bool | None = True) -> AsyncIterator[Follower]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    follower = Follower(context, Source(0, addresses.events, topic, addresses.replay if replay else "", binds))
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(follower.subscription.run)
            yield follower
            nursery.cancel_scope.cancel()
    finally:
        context.destroy(linger=0)


@asynccontextmanager
async def followed(topic: str = "", *, replay: bool = True) -> AsyncIterator[tuple[Publisher, Follower]]:
    """A publisher with a subscriber that is there, and that has heard of nothing yet."""
    async with publishing(topic) as (publisher, addresses), following(addresses, topic, replay=replay) as follower:
        await publisher.subscribed()
        if replay:
            await follower.feed.until(lambda: follower.feed.whole)
        yield publisher, follower


async def test_what_was_published_before_is_replayed_and_what_comes_is_taken_once():
    async with publishing() as (publisher, addresses):
        publisher.publish(block(1))
        publisher.publish(block(2), Removed([1]))
        async with following(addresses) as follower:
            await follower.until(2)
            await publisher.subscribed()
            publisher.publish(block(3))
            await follower.until(2, 3)
            assert (follower.feed.whole, follower.counters.batches, follower.counters.gaps) == (True, 3, 0)
            assert publisher.replays == [0]


async def test_lost_batches_are_replayed_in_their_order():
    async with followed() as (publisher, follower):
        publisher.publish(block(1))
        publisher.publish(block(2), lost=True)
        publisher.publish(Removed([1, 2]), lost=True)
        publisher.publish(block(1), block(3))
        await follower.until(1, 3)
        assert publisher.replays == [0, 1]
        assert (follower.feed.whole, follower.counters.gaps, follower.counters.losses, follower.counters.batches) == (True, 1, 0, 4)


@pytest.mark.parametrize("by", ["a batch before", "a call that has ended"])
async def test_lost_batches_that_nothing_follows_are_asked_for_when_the_engine_is_silent(mock_clock, by):
    async with followed() as (publisher, follower):
        if by == "a batch before":
            publisher.publish(block(1))
            await follower.until(1)
        else:
            publisher.publish(block(1), lost=True)
            follower.ended += 1
        publisher.publish(block(2), lost=True)
        await wait_all_tasks_blocked()
        assert len(publisher.replays) == 1
        mock_clock.jump(5)
        await follower.until(1, 2)
        publisher.publish(block(3))
        await follower.until(1, 2, 3)
        assert (follower.counters.gaps, follower.counters.losses) == (1, 0)


async def test_a_silent_engine_is_asked_once_for_all_that_it_has_done(autojump_clock, nursery, monkeypatch):
    asked: list[float] = []

    class Silent:
        async def receive(self) -> list[bytes]:
            await trio.sleep_until(100)
            return []

    async def replay() -> None:
        asked.append(trio.current_time())

    async def end_calls() -> None:
        for at in (31, 32, 33, 52):
            await trio.sleep_until(at)
            follower.ended += 1

    with zmq.Context() as context:
        follower = Follower(context, Source(0, "tcp://127.0.0.1:1"))
        monkeypatch.setattr(follower.subscription, "_replay", replay)
        nursery.start_soon(end_calls)
        await follower.subscription._receive(cast("Socket", Silent()))
    assert asked == [35, 55]


async def test_what_comes_by_itself_and_by_replay_counts_once():
    async with followed() as (publisher, follower):
        publisher.publish(lost=True)
        for _ in range(5):
            publisher.publish(block(1))
        publisher.publish(*[Removed([1])] * 5, block(2))
        await follower.until(2)
        assert follower.feed.holder.blocks("GPU") == 1


async def test_a_replay_with_a_hole_is_asked_for_again_from_there():
    async with followed() as (publisher, follower):
        for number in range(1, 6):
            publisher.publish(block(number), lost=True)
        publisher.drops = {3}
        publisher.publish(block(6))
        await follower.until(1, 2, 3, 4, 5, 6)
        assert publisher.replays == [0, 0, 3]
        assert follower.counters.losses == 0


async def test_an_engine_is_forgotten_when_lost_batches_are_gone_for_good():
    async with followed() as (publisher, follower):
        publisher.publish(block(1))
        publisher.publish(Removed([1]), lost=True)
        publisher.publish(block(2), lost=True)
        del publisher.batches[1]
        publisher.publish(block(3))
        await follower.until(2, 3)
        assert (follower.feed.whole, follower.counters.losses) == (False, 1)
        publisher.publish(Cleared(), block(4))
        await follower.until(4)
        assert follower.feed.whole


async def test_without_replay_a_gap_makes_the_engine_forgotten():
    async with followed(replay=False) as (publisher, follower):
        publisher.publish(block(1))
        await follower.until(1)
        assert follower.feed.whole  # it was the first of all
        publisher.publish(lost=True)
        publisher.publish(block(2))
        await follower.until(2)
        assert (follower.feed.whole, follower.counters.losses) == (False, 1)


async def test_who_comes_late_and_without_replay_begins_in_the_middle_and_knows_it():
    async with publishing() as (publisher, addresses):
        publisher.publish(block(1))
        async with following(addresses, replay=False) as follower:
            await publisher.subscribed()
            publisher.publish(block(2))
            await follower.until(2)
            assert (follower.feed.whole, follower.counters.gaps, follower.counters.losses) == (False, 0, 0)


async def test_a_silent_replay_is_given_up(monkeypatch):
    monkeypatch.setattr(subscription_module, "_REPLAY_SILENCE", 0.05)
    async with publishing() as (publisher, addresses):
        publisher.silent = True
        publisher.publish(block(1))
        async with following(addresses) as follower:
            await follower.until(1)
            await publisher.subscribed()
            publisher.publish(block(2))
            await follower.until(1, 2)


async def test_another_engine_in_its_place_begins_with_nothing():
    async with followed() as (publisher, follower):
        for number in (1, 2, 3):
            publisher.publish(block(number))
        await follower.until(1, 2, 3)
        publisher.restart()
        publisher.publish(block(4))
        await follower.until(4)
        assert (follower.feed.whole, follower.counters.restarts) == (True, 1)


async def test_other_topics_are_not_ours_though_they_begin_alike():
    async with followed("kv") as (publisher, follower):
        publisher.send([b"kv2", (0).to_bytes(8, "big"), b"\x93\x01\x90\x00"])
        publisher.publish(block(1))
        await follower.until(1)
        assert follower.counters.batches == 1


async def test_what_cant_be_read_is_counted_and_costs_nothing_else():
    async with followed() as (publisher, follower):
        publisher.send([b"", b"7"])
        publisher.send([b"", b"7", b""])
        publisher.publish(payload=b"\xc1")
        publisher.publish(block(1))
        await follower.until(1)
        assert (follower.counters.malformed, follower.counters.batches) == (3, 2)


async def test_a_publisher_that_comes_later_or_comes_back_is_found():
    async with publishing() as (_, addresses):
        pass  # only for an address that is free
    async with following(addresses, replay=False) as follower:
        for number in (1, 2):
            async with publishing(events=addresses.events) as (publisher, _):
                await publisher.subscribed()
                publisher.publish(block(number))
                await follower.until(number)
    assert follower.counters.restarts == 1


@pytest.mark.parametrize("binds", [None, False])
async def test_for_an_engine_that_connects_we_bind(binds):
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        with Socket(context, zmq.XPUB) as pub:
            endpoint = f"tcp://127.0.0.1:{free_ports(1)[0]}"
            async with following(Addresses(endpoint, ""), binds=binds) as follower:
                pub.raw.connect(endpoint)
                with trio.fail_after(20):
                    await pub.receive()
                Publisher(pub, None).publish(block(1))
                await follower.until(1)
    finally:
        context.destroy(linger=0)


async def test_an_address_that_the_engine_has_bound_is_connected_to_though_it_doesnt_look_so():
    async with publishing() as (publisher, addresses), following(addresses, binds=None) as follower:
        await publisher.subscribed()
        publisher.publish(block(1))
        await follower.until(1)


async def test_an_endpoint_that_cant_be_is_an_error():
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with pytest.raises(zmq.ZMQError):
        await Follower(context, Source(0, "tcp://", binds=True)).subscription.run()
    context.destroy(linger=0)


events = st.one_of(
    st.integers(0, 5).map(block), st.integers(0, 5).map(lambda number: Removed([number])), st.just(Cleared()) | st.integers(0, 5).map(block)
)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.lists(events, max_size=3), st.booleans()), max_size=12))
def test_the_index_is_the_engines_whatever_is_lost(batches: list[tuple[list[Event], bool]]):
    """As long as it can be replayed, and something comes at last that shows the gap."""

    async def check() -> None:
        cached: list[int] = []
        async with followed() as (publisher, follower):
            for batch, lost in [*batches, ([block(100)], False)]:
                publisher.publish(*batch, lost=lost)
                for event in batch:
                    match event:
                        case Stored():
                            cached.append(event.token_ids[0])
                        case Removed():
                            cached = without(cached, event)
                        case Cleared():
                            cached = []
            await follower.until(*cached)
            assert follower.feed.whole

    trio.run(check)


def without(cached: list[int], removed: Removed) -> list[int]:
    rest = list(cached)
    for number in removed.block_hashes:
        if number in rest:
            rest.remove(int(number))
    return rest
