"""Real engines that publish KV events, and what is asked of a headrace with the policy `kv` in front of them."""

import itertools
import json
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import zmq

from plugins.routing_kv.events import Event, Stored, decode
from tests import workers
from tests.proxy import RunningProxy, wait_for
from tests.workers import RunningWorker
from tests.workers.processes import free_ports

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

    def stored(self, prompt: Sequence[int], adapter: str | None = None) -> list[Any]:
        """The hashes under which it stored the blocks of a prompt, which came in one event; waits for it."""

        def found() -> list[Any] | None:
            stored = [event for event in self.replayed() if isinstance(event, Stored) and event.lora_name == adapter]
            return next((event.block_hashes for event in stored if event.token_ids[:BLOCK] == list(prompt[:BLOCK])), None)

        return wait_for(found)

    def generate(self, token_ids: Sequence[int], **members: Any) -> None:
        """Ask the worker itself, for one token."""
        body = {"token_ids": list(token_ids), "sampling_params": {"max_tokens": 1, "temperature": 0.0}, **members}
        httpx.post(f"{self.worker.http}/inference/v1/generate", json=body, timeout=120).raise_for_status()


def start(stack: ExitStack, **options: Any) -> Engine:
    """Start one; `options` are those of `workers.engine`."""
    events, replay = free_ports(2)
    config = {"enable_kv_cache_events": True, "endpoint": f"tcp://*:{events}", "replay_endpoint": f"tcp://*:{replay}", "topic": "kv"}
    arguments = ["--kv-events-config", json.dumps(config), "--prefix-caching-hash-algo", "sha256_cbor"]
    running: AbstractContextManager[RunningWorker] = workers.engine(engine_arguments=arguments, **options)
    return Engine(stack.enter_context(running), f"tcp://127.0.0.1:{events}", f"tcp://127.0.0.1:{replay}")


def fresh(length: int) -> list[int]:
    """A prompt that no other test has."""
    number = next(_numbers)
    return [40 + number // 200, 40 + number % 200, *(40 + (position * (7 + number)) % 200 for position in range(length - 2))]


def ask(proxy: RunningProxy, token_ids: Sequence[int], *, max_tokens: int = 2, **members: Any) -> httpx.Response:
    """A greedy call of so many tokens; `members` are further ones of its body."""
    sampling = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
    body = {"token_ids": list(token_ids), "sampling_params": sampling, **members}
    reply = httpx.post(f"{proxy.url}/inference/v1/generate", json=body, timeout=120)
    assert reply.status_code == 200, reply.text
    return reply


def route(reply: httpx.Response) -> tuple[str, str]:
    """The worker, and why."""
    return reply.headers["x-headrace-worker"], reply.headers["x-headrace-route"]


def indexed(proxy: RunningProxy) -> Counter[str]:
    """Blocks in the index, by worker."""
    text = httpx.get(f"{proxy.url}/metrics", timeout=10).text
    found = re.findall(r'^headrace_kv_blocks\{.*worker="(\w+)".*\} (\S+)$', text, re.MULTILINE)
    return Counter({worker: 0 for worker, _ in found}) + Counter(worker for worker, count in found for _ in range(int(float(count))))
