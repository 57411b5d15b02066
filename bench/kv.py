"""`python -m bench kv`: what the policy `kv` costs: a choice among many workers, the events that it follows, the memory of its index."""

import gc
import logging
import random
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import msgspec
import structlog
import trio
import zmq

from bench.machine import facts
from core import Call, Choice, SamplingParams, Worker, WorkerInfo, WorkerSettings
from plugins.routing_kv import KV, Settings
from plugins.routing_kv.events import decode
from plugins.routing_kv.feed import Feed
from plugins.routing_kv.hashing import Prompt
from plugins.routing_kv.index import Index
from plugins.routing_kv.sockets import Socket
from plugins.routing_kv.sources import Source
from plugins.routing_kv.subscription import Subscription

WORKERS = 256
BLOCKS = 1_000_000
PROMPT = 30_000
BLOCK = 16
EVENTS = 20_000
_CHOICES = 101
_PAGE = 4096


def main() -> int:
    """Measure and print. Times are CPU times of the thread: what else runs on the machine changes them little."""
    print(f"{', '.join(f'{name} {value}' for name, value in facts().items())}\n")
    kv, workers, call, bytes_per_block = _full_index()
    print(f"index: {BLOCKS:,} blocks on {WORKERS} workers, {bytes_per_block:.0f} bytes of memory a block")
    kv.choose_worker(call, workers)
    _print_milliseconds(f"choice: {PROMPT:,} tokens, {WORKERS} workers", lambda: kv.choose_worker(call, workers))
    choices: list[Choice] = []

    def choose() -> None:
        choices.append(kv.choose_worker(call, workers))

    _print_milliseconds("beginning of its attempt, blocks noted", lambda: kv.attempt_started(call, choices[-1]), before=choose)
    others = [Choice(workers[0], "") for _ in range(_CHOICES)]
    _print_milliseconds("beginning of one that another policy has chosen", lambda: kv.attempt_started(call, others.pop()))
    _print_milliseconds("choice, with those", lambda: kv.choose_worker(call, workers))
    short = Call(id="", token_ids=call.token_ids[:200], sampling=SamplingParams())
    _print_milliseconds(f"choice: 200 tokens, {WORKERS} workers", lambda: kv.choose_worker(short, workers))
    _print_milliseconds("choice: 200 tokens, 8 workers", lambda: kv.choose_worker(short, workers[:8]))
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    for blocks in (1, 8):
        payloads = [_payload(number, blocks) for number in range(EVENTS)]
        print(f"events of {blocks} block(s): {EVENTS / _apply(payloads):,.0f}/s decoded and indexed", end="")
        print(f", {EVENTS / trio.run(_follow, payloads):,.0f}/s through ZeroMQ, on one core")
    return 0


def _full_index() -> tuple[KV, list[Worker], Call, float]:
    """Every worker has another part of the prompt, which is the worst case for a walk along it, and blocks of its own."""
    draw = random.Random(1)
    call = Call(id="", token_ids=[draw.randrange(150_000) for _ in range(PROMPT)], sampling=SamplingParams(max_tokens=100))
    prompt = Prompt(call, BLOCK, call.identity.namespace)
    names = prompt.reach(prompt.length)
    kv = KV(Settings(), clock=time.monotonic)
    workers = [_worker(number) for number in range(WORKERS)]
    feeds = [Feed(kv._places.of(worker)[0].feed.holder) for worker in workers]
    gc.collect()
    before = _resident()
    stored = 0
    for number, feed in enumerate(feeds):
        own = names[: len(names) * number // (WORKERS - 1)]
        own += [draw.getrandbits(60) for _ in range(BLOCKS // WORKERS - len(own))]
        for name in own:
            feed.holder.store("GPU", draw.getrandbits(64), name)
        stored += len(own)
    return kv, workers, call, (_resident() - before) / stored


def _worker(number: int) -> Worker:
    worker = Worker(WorkerSettings(grpc="127.0.0.1:50051", id=f"w{number}"))
    worker.info = WorkerInfo(models=("m",), model_id="m", max_model_len=PROMPT, kv_block_size=BLOCK)
    return worker


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE


def _print_milliseconds(what: str, do: Callable[[], object], *, before: Callable[[], object] = lambda: None) -> None:
    times: list[float] = []
    for _ in range(_CHOICES):
        before()
        start = time.thread_time()
        do()
        times.append(time.thread_time() - start)
    print(f"{what}: {median(times) * 1e3:.2f} ms (least {min(times) * 1e3:.2f})")


def _payload(number: int, blocks: int) -> bytes:
    """A batch of one event, of a prompt's first blocks, as vLLM writes it."""
    draw = random.Random(number)
    event = {
        "type": "BlockStored",
        "block_hashes": [draw.getrandbits(64) for _ in range(blocks)],
        "parent_block_hash": None,
        "token_ids": [draw.randrange(150_000) for _ in range(BLOCK * blocks)],
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [["7"], *[None] * (blocks - 1)],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    return msgspec.msgpack.encode([time.time(), [event], 0])


def _apply(payloads: list[bytes]) -> float:
    feed = Feed(Index(BLOCKS).holder())
    before = time.thread_time()
    for payload in payloads:
        for event in decode(payload).events:
            feed.apply(event)
    return time.thread_time() - before


async def _follow(payloads: list[bytes]) -> float:
    """Seconds of the thread from the first message to the last; all of them wait already."""
    feed = Feed(Index(BLOCKS * 10).holder())
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        with Socket(context, zmq.XPUB) as publisher:
            publisher.raw.setsockopt(zmq.SNDHWM, 0)
            publisher.raw.bind("tcp://127.0.0.1:*")
            endpoint = publisher.raw.getsockopt_string(zmq.LAST_ENDPOINT)
            subscription = Subscription(context, Source(0, endpoint, binds=True), feed, worker="bench")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(subscription.run)
                await publisher.receive()
                for number, payload in enumerate(payloads):
                    publisher.send([b"", number.to_bytes(8, "big"), payload])
                before = time.thread_time()
                while subscription.counters.batches < len(payloads):  # noqa: ASYNC110 - a measurement
                    await trio.sleep(0.001)
                spent = time.thread_time() - before
                nursery.cancel_scope.cancel()
    finally:
        context.destroy(linger=0)
    return spent
