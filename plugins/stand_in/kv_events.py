"""KV events on ZeroMQ, as vLLM's engines publish them: numbered batches for subscribers, the last of them again for whoever asks."""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, Self

import msgspec
import zmq
from msgspec import Struct
from msgspec.structs import replace

_NUMBER_BYTES: Final = 8
_END: Final = (-1).to_bytes(_NUMBER_BYTES, "big", signed=True)


class KVEventsConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """vLLM's `--kv-events-config`. A port of 0 is any free one."""

    enable_kv_cache_events: bool = False
    publisher: str = "zmq"
    #: Bound when it has `*` or `::` in it, else connected to.
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    #: Batches that can be replayed.
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    def at_rank(self, rank: int) -> Self:
        """Where a rank publishes: at the port + its number, but for a port of 0. Raises: `OSError` for what has no port (vLLM 0.33)."""
        replay = self.replay_endpoint and _at_rank(self.replay_endpoint, rank)
        return replace(self, endpoint=_at_rank(self.endpoint, rank), replay_endpoint=replay)


class KVEventPublisher:
    """The sockets; `config` says where they are. Opened on an event loop, which serves the replays."""

    def __init__(self, config: KVEventsConfig, host: str, rank: int = 0) -> None:
        """Raises: `OSError` when a rank above 0 has no place in the configuration."""
        self.config = config.at_rank(rank)
        self._rank = rank
        self._host = host
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._batches: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._next = 0
        self._replays: zmq.Socket[bytes] | None = None

    def __enter__(self) -> Self:
        """Open. Raises: `OSError` for an address that can't be had."""
        try:
            self._publisher = self._context.socket(zmq.PUB)
            self._publisher.set_hwm(self.config.hwm)
            endpoint = self.config.endpoint
            if "*" in endpoint or "::" in endpoint or endpoint.startswith("ipc:"):
                self.config = replace(self.config, endpoint=self._bind(self._publisher, endpoint))
            else:
                self._publisher.connect(endpoint)
            if self.config.replay_endpoint:
                self._replays = self._context.socket(zmq.ROUTER)
                self.config = replace(self.config, replay_endpoint=self._bind(self._replays, self.config.replay_endpoint))
                asyncio.get_running_loop().add_reader(self._replays.fileno(), self._serve_replays)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise OSError(error.errno, f"KV events: {error.strerror}") from error
        return self

    def __exit__(self, *_: object) -> None:
        if self._replays:
            asyncio.get_running_loop().remove_reader(self._replays.fileno())
        self._context.destroy(linger=0)

    def publish(self, events: Sequence[dict[str, Any]]) -> None:
        """Send one batch."""
        payload = msgspec.msgpack.encode([time.time(), events, self._rank])
        number, self._next = self._next, self._next + 1
        self._batches.append((number, payload))
        self._publisher.send_multipart([self.config.topic.encode(), number.to_bytes(_NUMBER_BYTES, "big"), payload])

    def _bind(self, socket: "zmq.Socket[bytes]", endpoint: str) -> str:
        """Bind, and say where: vLLM reports an endpoint as it was given, but for a port that was 0."""
        if not endpoint.endswith(":0"):
            socket.bind(endpoint)
            return endpoint
        socket.bind(f"tcp://{self._host}:*")
        return socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def _serve_replays(self) -> None:
        # ZeroMQ's descriptor tells of a change only, so all that is there is read.
        while self._replays:
            try:
                frames = self._replays.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) == 3:
                client, _, start = frames
                self._replay(self._replays, client, int.from_bytes(start, "big"))

    def _replay(self, socket: "zmq.Socket[bytes]", client: bytes, start: int) -> None:
        topic = self.config.topic.encode()
        for number, payload in self._batches:
            if number >= start:
                socket.send_multipart([client, b"", topic, number.to_bytes(_NUMBER_BYTES, "big"), payload])
        socket.send_multipart([client, b"", b"", _END, b""])


def _at_rank(endpoint: str, rank: int) -> str:
    address, _, port = endpoint.rpartition(":")
    if not rank or port == "0":
        return endpoint
    if not port.isdecimal():
        raise OSError(f"KV events: {endpoint} has no port, so that rank {rank} has no place; use tcp://")
    return f"{address}:{int(port) + rank}"
