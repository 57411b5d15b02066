"""Following one engine's events: every batch once and in order, what was lost asked for again.

Batches are numbered from 0. A number that is missing is asked for at the engine's replay address, which keeps the last ten thousand; what
can't be had any more makes the index forget the engine, because it would believe in blocks that are gone. Of the last batches nothing tells
that they are missing, so once the engine has fallen silent it is asked whether there are more.
"""

from collections.abc import Callable
from typing import Final

import structlog
import trio
import zmq
from msgspec import Struct

from plugins.routing_kv.events import decode
from plugins.routing_kv.feed import Feed
from plugins.routing_kv.sockets import Socket
from plugins.routing_kv.sources import Source

log = structlog.stdlib.get_logger()

#: A lost publisher is tried again after so many milliseconds, then twice as many, up to the second.
_RECONNECT: Final = (100, 5_000)
#: Messages that wait to be read; the engine keeps as many. More are lost, and asked for again.
_WAITING: Final = 100_000
#: Batches that are taken before others get a turn.
_TURN: Final = 32
#: Seconds without a word after which a replay is given up. vLLM 0.33 looks for requests ten times a second.
_REPLAY_SILENCE: Final = 5.0
#: Seconds without a batch after which the engine is asked whether one was lost, if it has done something since it was asked.
_SILENCE: Final = 5.0
#: How often, and after how many seconds each time, an address is tried that ZeroMQ has still to free.
_BINDING: Final = 20
_BINDING_PAUSE: Final = 0.05
_NUMBER_BYTES: Final = 8
_END: Final = (-1).to_bytes(_NUMBER_BYTES, "big", signed=True)


class Counters(Struct):
    """What became of one engine's messages."""

    batches: int = 0
    malformed: int = 0
    #: Times that batches were missing, and that some of them were gone for good.
    gaps: int = 0
    losses: int = 0
    restarts: int = 0


class Subscription:
    """One source, put into one feed. `ended` counts the calls that have left the engine."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        source: Source,
        feed: Feed,
        *,
        worker: str,
        ended: Callable[[], int] = lambda: 0,
    ) -> None:
        self.counters = Counters()
        self.source = source
        #: Whether headrace has bound the endpoint, and not the engine.
        self.bound = False
        self._context = context
        self._feed = feed
        self._log = log.bind(worker=worker, rank=source.rank)
        self._topic = source.topic.encode()
        #: The number of the next batch, and of the last one that came by itself.
        self._next = 0
        self._last = -1
        self._ended = ended
        #: What there was when the engine was last asked for lost batches: the last one that came, and the calls that had left it.
        self._asked = self._last, 0

    async def run(self, *, ours: bool = False) -> None:
        """Follow the events until cancelled. ZeroMQ connects again by itself, for as long as it takes.

        `ours` says that headrace has bound the endpoint before: then it may take a moment until that can be bound again.

        Raises: `zmq.ZMQError` for an endpoint that can't be.
        """
        with Socket(self._context, zmq.SUB) as socket:
            await self._open(socket, ours=ours)
            # Subscribed first: what comes meanwhile waits, and is told by its number from what is replayed.
            await self._replay()
            while True:
                await self._take(await self._receive(socket))
                for _ in range(_TURN):
                    frames = socket.receive_nowait()
                    if frames is None:
                        break
                    await self._take(frames)
                await trio.lowlevel.checkpoint()

    def forget(self) -> None:
        """What has come may have been another engine's, too: begin anew with the next `run`."""
        self._next, self._last = 0, -1
        self._feed.restart()

    async def _receive(self, socket: Socket) -> list[bytes]:
        """The next message."""
        while True:
            with trio.move_on_after(_SILENCE):
                return await socket.receive()
            if self._asked != (done := (self._last, self._ended())):
                self._asked, start = done, self._next
                await self._replay()
                self.counters.gaps += self._next > start

    async def _take(self, frames: list[bytes]) -> None:
        """One message as it came: topic, number, payload. Waits only while lost ones are replayed."""
        if len(frames) != 3 or len(frames[1]) != _NUMBER_BYTES:
            self.counters.malformed += 1
            return
        topic, number_bytes, payload = frames
        if topic != self._topic:  # ZeroMQ compares the beginning only
            return
        number = int.from_bytes(number_bytes, "big")
        if number <= self._last:
            await self._restart()
        self._last = number
        if number > self._next:
            self.counters.gaps += self._is_under_way
            await self._replay()
            if number > self._next:
                self._skip_to(number)
        if number == self._next:
            self._apply(number, payload)

    @property
    def _is_under_way(self) -> bool:
        """Whether what is in the index would be wrong if a batch were left out."""
        return self._next > 0 or self._feed.whole

    async def _restart(self) -> None:
        """Another engine publishes here now, whose numbers begin anew."""
        self.counters.restarts += 1
        self._log.info("kv.engine_restarted")
        self._next = 0
        self._feed.restart()
        await self._replay()

    def _skip_to(self, number: int) -> None:
        """The batches before this one can't be had any more."""
        if self._is_under_way:
            self.counters.losses += 1
            self._log.warning("kv.events_lost", batches=number - self._next)
            self._feed.restart()
        self._next = number

    async def _replay(self) -> None:
        """Apply the batches from the next one on that the engine still has."""
        if not self.source.replay:
            return
        while True:
            start = self._next
            # An engine that sends faster than its connection can take drops what is too much: so again, as long as more comes.
            if await self._replay_once() or self._next == start:
                return

    async def _replay_once(self) -> bool:
        """Whether everything has come that the engine had."""
        with Socket(self._context, zmq.DEALER) as socket:
            socket.raw.setsockopt(zmq.RCVHWM, 0)
            socket.raw.connect(self.source.replay)
            socket.send([b"", self._next.to_bytes(_NUMBER_BYTES, "big")])
            first = True
            while True:
                frames = None
                with trio.move_on_after(_REPLAY_SILENCE):
                    frames = await socket.receive()
                if frames is None or len(frames) != 4:
                    self._log.warning("kv.no_replay", endpoint=self.source.replay)
                    return False
                number = int.from_bytes(frames[2], "big")
                ended = frames[2] == _END
                if first and self._next == 0 and (ended or number == 0):
                    self._feed.whole = True
                if ended:
                    return True
                if number > self._next:
                    if not first:
                        return False
                    self._skip_to(number)
                if number == self._next:
                    self._apply(number, frames[3])
                first = False
                await trio.lowlevel.checkpoint()

    def _apply(self, number: int, payload: bytes) -> None:
        if number == 0:
            self._feed.whole = True
        self._next = number + 1
        batch = decode(payload)
        self.counters.batches += 1
        self.counters.malformed += batch.malformed
        for event in batch.events:
            self._feed.apply(event)

    async def _open(self, socket: Socket, *, ours: bool) -> None:
        raw = socket.raw
        raw.setsockopt(zmq.RCVHWM, _WAITING)
        raw.setsockopt(zmq.RECONNECT_IVL, _RECONNECT[0])
        raw.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT[1])
        raw.setsockopt(zmq.SUBSCRIBE, self._topic)
        self.bound = self.source.binds is not True and await self._bind(raw, tries=_BINDING if ours else 1)
        if not self.bound:
            raw.connect(self.source.endpoint)
        self._log.info("kv.subscribed", endpoint=self.source.endpoint, bound=self.bound)

    async def _bind(self, raw: "zmq.Socket[bytes]", *, tries: int) -> bool:
        """Bind, for an engine that connects. Where that can't be, the engine has bound the address itself."""
        for left in reversed(range(tries)):
            try:
                raw.bind(self.source.endpoint)
            except zmq.ZMQError:
                if not left and self.source.binds is False:
                    raise
                await trio.sleep(_BINDING_PAUSE if left else 0)
            else:
                return True
        return False
