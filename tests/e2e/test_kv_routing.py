"""The policy `kv` on real engines that publish KV events: it knows what they have, sends calls there, and they have it."""

from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
import trio
import zmq

from plugins.routing_kv.engine_hash import block_hashes, event_hash
from plugins.routing_kv.events import Cleared, Event, Removed, Stored
from plugins.routing_kv.feed import Feed
from plugins.routing_kv.index import Index
from plugins.routing_kv.sources import Source
from plugins.routing_kv.subscription import Subscription
from tests import workers
from tests.e2e.publishers import BLOCK, SETTINGS, Engine, ask, fresh, indexed, route, start
from tests.proxy import RunningProxy, headrace, wait_for
from tests.workers import components

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def engines() -> Iterator[list[Engine]]:
    """Two behind the newest server: theirs doesn't tell in its replies what was cached, and this one can't give them adapters."""
    if reason := workers.why_not("engine") or workers.why_not("scripted"):
        pytest.skip(f"no engine worker here: {reason}")
    server = components.server_binary()
    with ExitStack() as one, ExitStack() as other, ThreadPoolExecutor(2) as threads:
        yield list(threads.map(lambda stack: start(stack, server=server, lora=False), [one, other]))


@pytest.fixture(scope="module")
def proxy(engines: list[Engine]) -> Iterator[RunningProxy]:
    with headrace(*(engine.worker for engine in engines), settings=SETTINGS) as proxy:
        yield proxy


def cached(reply: httpx.Response) -> int:
    return reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_later_turns_of_a_session_land_where_its_prefix_is_and_their_replies_say_that_it_was_cached(proxy):
    """Salted sessions of the same tokens as the others: each has a prefix of its own."""
    prompts = [fresh(2 * BLOCK - 8) for _ in range(2)]
    sessions = [(prompt.copy(), salt) for prompt in prompts for salt in (None, "7")]
    before = indexed(proxy).total()
    homes: list[str] = []
    for tokens, salt in sessions:
        reply = ask(proxy, tokens, max_tokens=16, cache_salt=salt)
        homes.append(route(reply)[0])
        assert cached(reply) == 0
        tokens += reply.json()["choices"][0]["token_ids"]
    assert set(homes) == {"w0", "w1"}
    # With its output each prompt has become two full blocks; only the events tell that.
    for blocks in (2, 3):
        wait_for(lambda: indexed(proxy).total() == before + blocks * len(sessions))  # noqa: B023 - called in this round only
        more = fresh(BLOCK)
        for (tokens, salt), home in zip(sessions, homes, strict=True):
            tokens += more
            reply = ask(proxy, tokens, max_tokens=16, cache_salt=salt)
            assert route(reply) == (home, f"kv: {blocks} of {blocks + 1} blocks")
            assert cached(reply) == blocks * BLOCK
            tokens += reply.json()["choices"][0]["token_ids"]


def test_the_same_tokens_under_another_salt_are_found_nowhere(proxy):
    prompt = fresh(2 * BLOCK + 1)
    before = indexed(proxy)
    home, reason = route(ask(proxy, prompt, cache_salt="7"))
    assert reason == "kv: 0 of 2 blocks"
    wait_for(lambda: indexed(proxy)[home] == before[home] + 2)
    assert route(ask(proxy, prompt, cache_salt="7")) == (home, "kv: 2 of 2 blocks")
    for salt in ("8", None):
        reply = ask(proxy, prompt, cache_salt=salt)
        assert (route(reply)[1], cached(reply)) == ("kv: 0 of 2 blocks", 0)


def test_a_reset_of_the_cache_is_known_at_once(engines, proxy):
    prompt = fresh(BLOCK + 1)
    home, _ = route(ask(proxy, prompt))
    wait_for(lambda: indexed(proxy)[home])
    httpx.post(f"{proxy.url}/reset_prefix_cache", timeout=60).raise_for_status()
    wait_for(lambda: ask(proxy, fresh(4)) and not indexed(proxy)[home])


def test_our_hashes_are_the_engines(engines):
    engine = engines[0]
    for salt in ("", "7"):
        prompt = fresh(3 * BLOCK + 5)
        engine.generate(prompt, cache_salt=salt or None)
        assert engine.stored(prompt) == [event_hash(digest) for digest in block_hashes(prompt, BLOCK, salt=salt)]


def test_with_events_lost_and_replayed_the_index_is_the_engines(engines):
    """A subscriber that misses a range of batches, and the engine's own account of them all."""
    engine = engines[1]
    prompts = [fresh(2 * BLOCK) for _ in range(6)]
    feed = Feed(Index(100_000).holder())

    class Forgetful(Subscription):
        lost: frozenset[int] = frozenset()

        async def _take(self, frames: list[bytes]) -> None:
            if int.from_bytes(frames[1], "big") not in self.lost:
                await super()._take(frames)

    async def check() -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        subscription = Forgetful(context, Source(0, engine.events, "kv", engine.replay, binds=True), feed, worker="w")
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(subscription.run)
                behind = len(await trio.to_thread.run_sync(engine.payloads))
                await until(lambda: subscription.counters.batches == behind)  # what was there before has been replayed
                subscription.lost = frozenset(range(behind + 1, behind + 4))
                for prompt in prompts:
                    await trio.to_thread.run_sync(engine.generate, prompt)
                    await trio.to_thread.run_sync(engine.generate, prompt)  # computes its last block again
                await trio.to_thread.run_sync(lambda: httpx.post(f"{engine.worker.http}/reset_prefix_cache", timeout=60).raise_for_status())
                for prompt in prompts[:3]:
                    await trio.to_thread.run_sync(engine.generate, prompt)
                events = await trio.to_thread.run_sync(engine.replayed)
                await until(lambda: held(feed) == account(events).keys())
                assert (subscription.counters.gaps, subscription.counters.losses, feed.whole) == (1, 0, True)
                nursery.cancel_scope.cancel()
        finally:
            context.destroy(linger=0)

    trio.run(check)
    assert len(held(feed)) == 6


async def until(condition) -> None:
    """What ZeroMQ's own thread brings can only be looked for."""
    with trio.fail_after(30):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.02)


def held(feed: Feed) -> set[int]:
    return {engine_hash for own in feed.holder._media.values() for shard in own.shards for engine_hash in shard}


def account(events: Sequence[Event]) -> Counter[Any]:
    """The blocks that are cached after these events, with their copies."""
    cached: Counter[Any] = Counter()
    for event in events:
        match event:
            case Stored():
                cached.update(event.block_hashes)
            case Removed():
                cached.subtract(event.block_hashes)
                cached = +cached
            case Cleared():
                cached.clear()
    return cached
