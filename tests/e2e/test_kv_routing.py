"""The policy `kv` on real engines that publish KV events: it knows what they have, sends calls there, and they have it."""

import base64
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec
import pytest
import trio
import zmq

from plugins.routing_kv.engine_hash import block_hashes, event_hash
from plugins.routing_kv.events import Cleared, Event, Removed, Stored, decode
from plugins.routing_kv.feed import Feed
from plugins.routing_kv.index import Index
from plugins.routing_kv.sources import Source
from plugins.routing_kv.subscription import Subscription
from tests import workers
from tests.conformance.plugins.cached import cached_tokens
from tests.proxy import RunningProxy, headrace, wait_for
from tests.workers import RunningWorker, components
from tests.workers.images import IN_PROMPT, OFFSET, TOKENS, prepared
from tests.workers.processes import free_ports
from tests.workers.tiny_vision import VISION_START

pytestmark = pytest.mark.real

#: Tokens of one block of the CPU engine's prefix cache.
BLOCK = 128
SETTINGS = '[routing]\npolicies = ["kv"]\n'
_numbers = itertools.count()


@dataclass(frozen=True)
class Engine:
    """An engine with its publisher's addresses."""

    worker: RunningWorker
    events: str
    replay: str

    def payloads(self) -> list[bytes]:
        """Every batch since its start, as it keeps them itself."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        payloads: list[bytes] = []
        try:
            with context.socket(zmq.DEALER) as socket:
                socket.setsockopt(zmq.RCVTIMEO, 10_000)
                socket.connect(self.replay)
                socket.send_multipart([b"", bytes(8)])
                while (frames := socket.recv_multipart())[2] != b"\xff" * 8:
                    payloads.append(frames[3])
        finally:
            context.destroy(linger=0)
        return payloads

    def replayed(self) -> list[Event]:
        """The events in them."""
        batches = [decode(payload) for payload in self.payloads()]
        assert not any(batch.malformed for batch in batches)
        return [event for batch in batches for event in batch.events]

    def generate(self, token_ids: Sequence[int], **members: Any) -> None:
        """Ask the worker itself, for one token."""
        body = {"token_ids": list(token_ids), "sampling_params": {"max_tokens": 1, "temperature": 0.0}, **members}
        httpx.post(f"{self.worker.http}/inference/v1/generate", json=body, timeout=120).raise_for_status()


def start(stack: ExitStack, **options: Any) -> Engine:
    events, replay = free_ports(2)
    config = {"enable_kv_cache_events": True, "endpoint": f"tcp://*:{events}", "replay_endpoint": f"tcp://*:{replay}", "topic": "kv"}
    arguments = ["--kv-events-config", json.dumps(config), "--prefix-caching-hash-algo", "sha256_cbor"]
    running: AbstractContextManager[RunningWorker] = workers.engine(engine_arguments=arguments, **options)
    return Engine(stack.enter_context(running), f"tcp://127.0.0.1:{events}", f"tcp://127.0.0.1:{replay}")


@pytest.fixture(scope="module")
def engines() -> Iterator[list[Engine]]:
    if reason := workers.why_not("engine"):
        pytest.skip(f"no engine worker here: {reason}")
    with ExitStack() as one, ExitStack() as other, ThreadPoolExecutor(2) as threads:
        yield list(threads.map(start, [one, other]))


@pytest.fixture(scope="module")
def proxy(engines: list[Engine]) -> Iterator[RunningProxy]:
    with headrace(*(engine.worker for engine in engines), settings=SETTINGS) as proxy:
        yield proxy


def fresh(length: int) -> list[int]:
    """A prompt that no other test has."""
    number = next(_numbers)
    return [40 + number // 200, 40 + number % 200, *(40 + (position * (7 + number)) % 200 for position in range(length - 2))]


def ask(proxy: RunningProxy, token_ids: Sequence[int], *, max_tokens: int = 2, **members: Any) -> httpx.Response:
    sampling = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
    body = {"token_ids": list(token_ids), "sampling_params": sampling, **members}
    reply = httpx.post(f"{proxy.url}/inference/v1/generate", json=body, timeout=120)
    assert reply.status_code == 200, reply.text
    return reply


def route(reply: httpx.Response) -> tuple[str, str]:
    return reply.headers["x-headrace-worker"], reply.headers["x-headrace-route"]


def indexed(proxy: RunningProxy) -> Counter[str]:
    """Blocks in the index, by worker."""
    text = httpx.get(f"{proxy.url}/metrics", timeout=10).text
    found = re.findall(r'^headrace_kv_blocks\{.*worker="(\w+)".*\} (\S+)$', text, re.MULTILINE)
    return Counter({worker: 0 for worker, _ in found}) + Counter(worker for worker, count in found for _ in range(int(float(count))))


def test_later_turns_of_a_session_land_where_its_prefix_is_and_find_it_cached(engines, proxy):
    length = 2 * BLOCK - 8
    sessions = [fresh(length) for _ in range(4)]
    before = indexed(proxy)
    homes = []
    for session in sessions:
        reply = ask(proxy, session, max_tokens=16)
        homes.append(route(reply)[0])
        session += reply.json()["choices"][0]["token_ids"]
    assert set(homes) == {"w0", "w1"}
    # With its output each prompt has become two full blocks; only the events tell that.
    wait_for(lambda: indexed(proxy).total() >= before.total() + 2 * len(sessions))
    for session, home in zip(sessions, homes, strict=True):
        session += fresh(BLOCK)
        worker = engines[int(home[1])].worker
        assert cached_tokens(worker, proxy, session) == 2 * BLOCK
        assert route(ask(proxy, [*session, 41])) == (home, "kv: 3 of 3 blocks")


def test_the_same_tokens_under_another_salt_or_adapter_are_found_nowhere(engines, proxy):
    prompt = fresh(2 * BLOCK + 1)
    for engine in engines:
        body = {"lora_name": "math", "lora_path": str(workers.adapter())}
        httpx.post(f"{engine.worker.http}/v1/load_lora_adapter", json=body, timeout=120).raise_for_status()
    before = indexed(proxy)
    home, reason = route(ask(proxy, prompt, cache_salt="7"))
    assert reason == "kv: 0 of 2 blocks"
    wait_for(lambda: indexed(proxy)[home] >= before[home] + 2)
    assert route(ask(proxy, prompt, cache_salt="7")) == (home, "kv: 2 of 2 blocks")
    assert route(ask(proxy, prompt, cache_salt="8"))[1] == route(ask(proxy, prompt))[1] == "kv: 0 of 2 blocks"


def test_a_reset_of_the_cache_is_known_at_once(engines, proxy):
    prompt = fresh(BLOCK + 1)
    home, _ = route(ask(proxy, prompt))
    wait_for(lambda: indexed(proxy)[home])
    httpx.post(f"{proxy.url}/reset_prefix_cache", timeout=60).raise_for_status()
    wait_for(lambda: ask(proxy, fresh(4)) and not indexed(proxy)[home])


def test_our_hashes_are_the_engines(engines):
    engine = engines[0]
    prompts = {salt: fresh(3 * BLOCK + 5) for salt in ("", "7")}
    for salt, prompt in prompts.items():
        engine.generate(prompt, **({"cache_salt": salt} if salt else {}))
    for salt, prompt in prompts.items():
        ours = [event_hash(digest) for digest in block_hashes(prompt, BLOCK, salt=salt)]

        def theirs(first: Sequence[int] = prompt[:BLOCK]) -> list[Any] | None:
            stored = [event for event in engine.replayed() if isinstance(event, Stored)]
            return next((event.block_hashes for event in stored if event.token_ids[:BLOCK] == list(first)), None)

        assert wait_for(theirs) == ours


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


# --- beside the stand-in -----------------------------------------------------------------------------------------------------------


def test_the_stand_in_publishes_the_same_in_the_same_form(engines):
    prompts = [fresh(2 * BLOCK + 3) for _ in range(3)]

    def told(engine: Engine) -> list[Any]:
        with httpx.Client(base_url=engine.worker.http, timeout=120) as client:
            body = {"lora_name": "same", "lora_path": str(workers.adapter())}
            client.post("/v1/load_lora_adapter", json=body).raise_for_status()
            client.post("/reset_prefix_cache").raise_for_status()
        engine.generate(prompts[0])
        engine.generate([*prompts[0], *range(40, 40 + 2 * BLOCK)])
        engine.generate(prompts[1], cache_salt="7")
        engine.generate(prompts[2], cache_salt="7", model="same")
        return wait_for(lambda: (found := since_the_last_reset(engine.payloads()))[4:] and found)

    with ExitStack() as stack:
        assert told(publishing_stand_in(stack)) == told(engines[0])


def publishing_stand_in(stack: ExitStack) -> Engine:
    events, replay = free_ports(2)
    config = {"enable_kv_cache_events": True, "endpoint": f"tcp://*:{events}", "replay_endpoint": f"tcp://*:{replay}", "topic": "kv"}
    worker = stack.enter_context(workers.stand_in(block_size=BLOCK, kv_events_config=json.dumps(config)))
    return Engine(worker, f"tcp://127.0.0.1:{events}", f"tcp://127.0.0.1:{replay}")


def since_the_last_reset(payloads: Sequence[bytes]) -> list[Any]:
    """The events from it on, undecoded but for MessagePack, with hashes and adapters numbered in the order of their coming."""
    events: list[dict[str, Any]] = []
    for payload in payloads:
        timestamp, batch, rank = msgspec.msgpack.decode(payload)
        assert (type(timestamp), rank) == (float, 0)
        events += batch
    reset = max(index for index, event in enumerate(events) if event["type"] == "AllBlocksCleared")
    numbers: dict[Any, int] = {}
    for event in events[reset + 1 :]:
        event["block_hashes"] = [numbers.setdefault(block, len(numbers)) for block in event["block_hashes"]]
        parent, adapter = event.get("parent_block_hash"), event.get("lora_id")
        event["parent_block_hash"] = parent and numbers[parent]
        event["lora_id"] = adapter and isinstance(adapter, int)
    return events[reset:]


# --- media -------------------------------------------------------------------------------------------------------------------------

PROMPT = [*range(40, 30 + BLOCK), *IN_PROMPT, *range(100, 112)]


@pytest.fixture(scope="module")
def seeing() -> Iterator[Engine]:
    if reason := workers.why_no_variants():
        pytest.skip(f"no engine with a model that sees here: {reason}")
    path = {"PYTHONPATH": str(components.vision_packages())}
    with ExitStack() as stack:
        yield start(stack, model=components.variant_models() / "vision", lora=False, environment=path)


def features(seed: int) -> dict[str, Any]:
    return {
        "mm_hashes": {"image": [f"picture-{seed}"]},
        "mm_placeholders": {"image": [{"offset": PROMPT.index(VISION_START) + OFFSET, "length": TOKENS}]},
        "kwargs_data": {"image": [base64.b64encode(prepared(seed)).decode()]},
    }


def test_equal_placeholders_with_another_image_are_not_found(seeing):
    kinds: list[dict[str, Any]] = [{"features": features(1)}, {"features": features(2)}, {}]
    with headrace(seeing.worker, settings=SETTINGS) as proxy:
        for blocks, members in enumerate(kinds):
            assert route(ask(proxy, PROMPT, **members))[1] == "kv: 0 of 1 blocks"
            wait_for(lambda: indexed(proxy)["w0"] == blocks + 1)  # noqa: B023
    # Another headrace believes nothing: it knows from the events alone.
    with headrace(seeing.worker, settings=SETTINGS) as proxy:
        wait_for(lambda: indexed(proxy)["w0"] == 3)
        for members in kinds:
            assert route(ask(proxy, PROMPT, **members))[1] == "kv: 1 of 1 blocks"
        assert route(ask(proxy, PROMPT, features=features(3)))[1] == "kv: 0 of 1 blocks"
