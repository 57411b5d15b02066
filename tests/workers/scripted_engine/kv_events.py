"""KV events as vLLM's engines publish them: a thread with a publisher, and the last batches again for whoever asks for them."""

import queue
import threading
import time
from collections import deque
from typing import Any

import zmq
from msgspec import msgpack

_END = (-1).to_bytes(8, "big", signed=True)
#: Seconds between two looks for requests, as vLLM 0.33 has it.
_PATIENCE = 0.1


def at_rank(endpoint: str, rank: int) -> str:
    """Where a rank publishes: at the port + its number."""
    address, _, port = endpoint.rpartition(":")
    return f"{address}:{int(port) + rank}"


class KVEventPublisher:
    """Publishes until the process ends."""

    def __init__(self, config: dict[str, Any], rank: int) -> None:
        self._rank = rank
        self._topic: bytes = config["topic"].encode()
        self._batches: queue.Queue[list[dict[str, Any]]] = queue.Queue()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=config["buffer_steps"])
        context = zmq.Context.instance()
        self._publisher, self._replays = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        self._publisher.bind(config["endpoint"])
        self._replays.bind(config["replay_endpoint"])
        threading.Thread(target=self._run, daemon=True).start()

    def publish(self, events: list[dict[str, Any]]) -> None:
        """Publish one batch, soon."""
        self._batches.put(events)

    def _run(self) -> None:
        number = 0
        while True:
            if self._replays.poll(0):
                self._replay(*self._replays.recv_multipart())
            try:
                events = self._batches.get(timeout=_PATIENCE)
            except queue.Empty:
                continue
            payload = msgpack.encode([time.time(), events, self._rank])
            self._publisher.send_multipart([self._topic, number.to_bytes(8, "big"), payload])
            self._kept.append((number, payload))
            number += 1

    def _replay(self, client: bytes, empty: bytes, start: bytes) -> None:
        for number, payload in self._kept:
            if number >= int.from_bytes(start, "big"):
                self._replays.send_multipart([client, empty, self._topic, number.to_bytes(8, "big"), payload])
        self._replays.send_multipart([client, empty, b"", _END, b""])
