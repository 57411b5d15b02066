"""One HTTP/2 connection to a worker: the trio driver around the protocol core.

Three tasks for each connection, none for each call: one reads, one writes what has gathered since it last wrote (so that
the calls of one tick share a packet), one watches over silence. Everything else is plain functions, called by whoever
has something to send.
"""

import itertools
import math
import random
from collections.abc import Awaitable, Callable
from typing import Protocol

import trio
from grpclib.const import Status

from core.wire.grpc.events import (
    Broken,
    Ended,
    Event,
    GoingAway,
    HeadReceived,
    MessageReceived,
    PingAnswered,
    SendWindowOpened,
    SettingsReceived,
)
from core.wire.grpc.exchange import Exchange
from core.wire.grpc.limits import ChannelLimits
from core.wire.grpc.protocol import ClientProtocol
from core.wire.grpc.signals import Signal

Connect = Callable[[], Awaitable[trio.abc.Stream]]
"""Makes a transport that speaks HTTP/2. Raises `OSError` or `trio.BrokenResourceError` with a text worth showing."""

_READ = 64 * 1024
_READ_BULK = 1024 * 1024
_LAST_WORDS = 1.0  # how long to go on reading when writing has failed: the peer may have said why


class Owner(Protocol):
    """What a connection tells its pool. Plain functions that don't raise."""

    def on_ready(self, connection: "Connection") -> None:
        """It can carry calls."""

    def on_room(self, connection: "Connection") -> None:
        """It may take a call that it couldn't take before; or it never will again."""

    def on_lost(self, connection: "Connection") -> None:
        """It's gone, and its calls have been told."""

    def on_too_many_pings(self) -> None:
        """The worker closes a connection because it was asked too often whether it's there."""


class Connection:
    """A connection and the calls on it. `reserved` belongs to the pool: calls that are about to open."""

    def __init__(self, owner: Owner, limits: ChannelLimits, name: str) -> None:
        self.reserved = 0
        self.ready = False
        self._name = name
        self._reason: str | None = None
        self._owner = owner
        self._limits = limits
        self._protocol = ClientProtocol(limits)
        self._exchanges: dict[int, Exchange] = {}
        self._blocked: dict[Exchange, None] = {}  # senders out of window, in order
        self._output: list[bytes] = []
        self._to_write = Signal()
        self._written_to = 0  # the highest stream that was handed to the transport
        self._heard = 0.0
        self._reads = 0
        self._idle_since = 0.0
        self._unsettled = False  # cancellations were sent since it was last known what the worker has read
        self._settling: dict[bytes, trio.Event] = {}  # by a PING's payload
        self._pings = itertools.count(random.getrandbits(32))
        self._closing = False
        self._scope = trio.CancelScope()
        self._setup = trio.CancelScope()

    # -- for the pool --

    @property
    def load(self) -> int:
        """Calls on it, or about to be."""
        return len(self._exchanges) + self.reserved

    @property
    def takes_calls(self) -> bool:
        """Whether a call may be opened now, as far as `load` is below `max_streams`."""
        return self.ready and not self._closing and self._protocol.takes_streams

    @property
    def retired(self) -> bool:
        """Whether it will never take a call again."""
        return self._closing or self._protocol.going_away

    @property
    def max_streams(self) -> int:
        """How many calls the worker takes on it at a time."""
        return self._protocol.max_streams

    @property
    def reason(self) -> str:
        """Why it ended, for the error of a call."""
        return f"{self._name}: {self._reason or 'the connection was closed'}"

    def close(self, reason: str | None = None) -> None:
        """Send what is left and a GOAWAY, then end. Calls on it are told that they are lost."""
        if self._closing:
            return
        self._because(reason)
        self._closing = True
        self._end_calls()
        self._protocol.close()
        if self.ready:
            self._to_write.wake()
        else:
            self._scope.cancel()

    async def settle(self) -> None:
        """Wait until the worker has read every cancellation that was sent, or the connection is gone. Cancellation: safe."""
        while (self._unsettled or self._protocol.strained) and not self._closing:
            self._unsettled = False
            payload = next(self._pings).to_bytes(8, "big")
            answered = self._settling[payload] = trio.Event()
            self._protocol.ping(payload)  # frames arrive in order
            self._to_write.wake()
            try:
                await answered.wait()
            finally:
                self._settling.pop(payload, None)

    async def run(self, connect: Connect, not_before: float) -> None:
        """Connect, serve until the end, whoever brings it about, and tell the owner. Doesn't raise for the network.

        `not_before`: trio's time at which to begin.

        Cancellation: cuts the connection; its calls are told.
        """
        stream: trio.abc.Stream | None = None
        try:
            with self._scope, self._setup:
                now = trio.current_time()
                if now < not_before:
                    await trio.sleep_until(not_before)
                self._setup.deadline = max(now, not_before) + self._limits.connect_timeout
                stream = await connect()
                await self._serve(stream)
            if self._setup.cancelled_caught:
                what = "no connection" if stream is None else "no HTTP/2 settings"
                self._because(f"{what} within {self._limits.connect_timeout:g} s (connect_timeout)")
        except (OSError, trio.BrokenResourceError) as error:
            self._because(_text_of(error))
        finally:
            self._closing = True
            self._end_calls()
            self._owner.on_lost(self)
            if stream is not None:
                with trio.move_on_after(self._limits.close_timeout, shield=True):
                    await stream.aclose()

    # -- for exchanges --

    def open(self, exchange: Exchange, headers: list[tuple[bytes, bytes]], *, end: bool) -> None:
        """Open a stream for it. Only while `takes_calls`, with room or a reservation."""
        exchange.stream_id = stream_id = self._protocol.open(headers, end=end)
        exchange.connection = self
        self._exchanges[stream_id] = exchange
        self._to_write.wake()

    def send(self, exchange: Exchange, data: memoryview, *, end: bool) -> int:
        """Send what goes; when that is not all, `exchange.writable` wakes once more may go."""
        sent = self._protocol.send(exchange.stream_id, data, end=end)
        if sent < len(data):
            self._blocked[exchange] = None
        self._to_write.wake()
        return sent

    def took(self, exchange: Exchange, size: int) -> None:
        """Messages of that size were taken from it."""
        if self._protocol.took(exchange.stream_id, size):
            self._to_write.wake()

    def reset(self, exchange: Exchange) -> None:
        """Cancel its stream, without waiting for anything."""
        if self._exchanges.pop(exchange.stream_id, None) is not None:
            self._protocol.reset(exchange.stream_id)
            self._unsettled = True
            self._to_write.wake()
            self._gone(exchange)

    # -- tasks --

    async def _serve(self, stream: trio.abc.Stream) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._write, stream)
            nursery.start_soon(self._watch)
            await self._read(stream)
            nursery.cancel_scope.cancel()

    async def _read(self, stream: trio.abc.Stream) -> None:
        size = _READ
        try:
            while data := await stream.receive_some(size):
                size = _READ_BULK if len(data) == size else _READ
                self._heard = trio.current_time()
                self._reads += 1
                for event in self._protocol.receive(bytes(data)):
                    self._on_event(event)
                if output := self._protocol.take_output():
                    self._output.append(output)
                    self._to_write.wake()
            self._because("the worker closed the connection")
        except trio.BrokenResourceError as error:
            self._because(f"the connection broke: {_text_of(error.__cause__ or error)}")

    async def _write(self, stream: trio.abc.Stream) -> None:
        try:
            while True:
                self._written_to = self._protocol.highest_stream_id
                self._output.append(self._protocol.take_output())
                output = b"".join(self._output)
                self._output.clear()
                if output:
                    await stream.send_all(output)
                elif self._closing:
                    self._scope.cancel()
                    return
                else:
                    await self._to_write.wait()
        except trio.BrokenResourceError as error:
            self._because(f"the connection broke: {_text_of(error.__cause__ or error)}")
            self._scope.deadline = trio.current_time() + _LAST_WORDS

    async def _watch(self) -> None:
        limits = self._limits
        self._heard = self._idle_since = trio.current_time()
        while True:
            now = trio.current_time()
            if not self._exchanges:
                idle_until = self._idle_since + limits.idle_timeout
                if idle_until <= now:
                    self.close("no calls")
                    return
                await trio.sleep(min(limits.keepalive_interval, idle_until - now))
            elif self._heard + limits.keepalive_interval > now:
                await trio.sleep_until(self._heard + limits.keepalive_interval)
            else:
                reads = self._reads
                self._protocol.ping(next(self._pings).to_bytes(8, "big"))
                self._to_write.wake()
                await trio.sleep(limits.keepalive_timeout)
                if self._reads == reads:
                    self._because(f"no answer to a PING within {limits.keepalive_timeout:g} s (keepalive_timeout)")
                    self._scope.cancel()
                    return

    # -- private --

    def _on_event(self, event: Event) -> None:
        match event:
            case MessageReceived():
                if (exchange := self._exchanges.get(event.stream_id)) is not None:
                    exchange.on_message(event.data)
            case HeadReceived():
                if (exchange := self._exchanges.get(event.stream_id)) is not None:
                    exchange.on_head(event.headers)
            case Ended():
                if (exchange := self._exchanges.pop(event.stream_id, None)) is not None:
                    exchange.on_end(event)
                    self._gone(exchange)
            case SendWindowOpened():
                self._unblock(event.stream_id)
            case SettingsReceived():
                if self.ready:
                    self._owner.on_room(self)
                else:
                    self.ready = True
                    self._setup.deadline = math.inf
                    self._owner.on_ready(self)
            case GoingAway():
                self._reason = event.reason
                if "too_many_pings" in event.reason:
                    self._owner.on_too_many_pings()
                if not self._exchanges:
                    self.close()
                self._owner.on_room(self)
            case Broken():
                self._reason = event.reason
                self.close()
                self._scope.deadline = trio.current_time() + _LAST_WORDS
            case PingAnswered():
                # For the watch it is enough that anything was heard.
                if (settled := self._settling.get(event.payload)) is not None:
                    settled.set()

    def _unblock(self, stream_id: int) -> None:
        if not self._blocked:
            return
        if stream_id:
            exchange = self._exchanges.get(stream_id)
            if exchange is not None and exchange in self._blocked:
                del self._blocked[exchange]
                exchange.writable.wake()
            return
        blocked, self._blocked = self._blocked, {}
        for exchange in blocked:
            exchange.writable.wake()

    def _gone(self, exchange: Exchange) -> None:
        """An exchange has left."""
        if self._blocked:
            self._blocked.pop(exchange, None)
        if not self._exchanges:
            self._idle_since = trio.current_time()
            if self._protocol.going_away:
                self.close()
        self._owner.on_room(self)

    def _end_calls(self) -> None:
        for settled in self._settling.values():
            settled.set()
        exchanges, self._exchanges = self._exchanges, {}
        self._blocked.clear()
        for stream_id, exchange in exchanges.items():
            unsent = stream_id > self._written_to
            exchange.on_end(Ended(stream_id, Status.UNAVAILABLE, self.reason, lost=True, unprocessed=unsent))

    def _because(self, reason: str | None) -> None:
        """The first reason is the best one; what the worker said itself is better still."""
        if self._reason is None:
            self._reason = reason


def _text_of(error: BaseException) -> str:
    """What happened, with the causes that trio puts behind its own text (one for each address it tried)."""
    text = str(error) or type(error).__name__
    causes: list[BaseException] = []
    match error.__cause__:
        case BaseExceptionGroup(exceptions=exceptions):
            causes.extend(exceptions)
        case OSError() as cause:
            causes.append(cause)
        case _:
            pass
    return f"{text} ({', '.join(map(str, causes))})" if causes else text
