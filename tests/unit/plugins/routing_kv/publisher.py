"""An engine's publisher on real sockets, as vLLM's: PUB for the batches, ROUTER for replays; and it can lose some."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import trio
import zmq

from plugins.routing_kv.events import Event
from plugins.routing_kv.sockets import Socket

END = b"\xff" * 8


class Publisher:
    """Numbers and sends batches. `keeps` is how many it can replay, `drops` numbers that it leaves out of the next replay."""

    def __init__(self, pub: Socket, router: Socket | None, topic: str = "") -> None:
        self._pub, self._router = pub, router
        self._topic = topic.encode()
        self.next = 0
        self.batches: dict[int, bytes] = {}
        self.replays: list[int] = []
        self.drops: set[int] = set()
        self.silent = False

    async def subscribed(self) -> None:
        """Wait for the next subscriber."""
        with trio.fail_after(20):
            await self._pub.receive()

    def publish(self, *events: Event, lost: bool = False, payload: bytes | None = None) -> None:
        """One batch; `lost` on its way to every subscriber."""
        encoded = payload if payload is not None else msgspec.msgpack.encode([1.0, list(events), 0])
        self.batches[self.next] = encoded
        if not lost:
            self.send([self._topic, self.next.to_bytes(8, "big"), encoded])
        self.next += 1

    def send(self, frames: list[bytes]) -> None:
        self._pub.send(frames)

    def restart(self) -> None:
        """Another engine takes its place."""
        self.next = 0
        self.batches.clear()

    async def serve_replays(self) -> None:
        assert self._router is not None
        while True:
            client, empty, start = await self._router.receive()
            self.replays.append(int.from_bytes(start, "big"))
            for number, encoded in self.batches.items():
                if number >= self.replays[-1] and number not in self.drops:
                    self._router.send([client, empty, self._topic, number.to_bytes(8, "big"), encoded])
            self.drops.clear()
            if not self.silent:
                self._router.send([client, empty, b"", END, b""])


class Addresses:
    """Where a publisher was bound."""

    def __init__(self, events: str, replay: str) -> None:
        self.events, self.replay = events, replay


@asynccontextmanager
async def publishing(
    topic: str = "", *, replays: bool = True, events: str = "tcp://127.0.0.1:*"
) -> AsyncIterator[tuple[Publisher, Addresses]]:
    """A publisher with a socket for each; XPUB, so that `subscribed` can wait for a subscriber."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        with Socket(context, zmq.XPUB) as pub, Socket(context, zmq.ROUTER) as router:
            pub.raw.bind(events)
            router.raw.bind("tcp://127.0.0.1:*")
            addresses = Addresses(*(socket.raw.getsockopt_string(zmq.LAST_ENDPOINT) for socket in (pub, router)))
            async with trio.open_nursery() as nursery:
                publisher = Publisher(pub, router, topic)
                if replays:
                    nursery.start_soon(publisher.serve_replays)
                yield publisher, addresses
                nursery.cancel_scope.cancel()
    finally:
        context.destroy(linger=0)
