"""The connections of a channel: which one takes a call, when another is opened, and who waits.

* A call goes to the least loaded connection. When all have `streams_per_connection` calls, another is opened, and calls
  wait for it; when there can't be another, they go on top, as far as the worker allows; then they wait, in order.
* After a failed attempt to connect the next one waits (`reconnect_delay`, doubling, ±20 %). Calls made meanwhile wait for
  that attempt and share its outcome; they wait at most `connect_timeout` before it begins.
"""

import math
import random

import trio
from grpclib.const import Status
from msgspec import structs

from core.wire.grpc.connection import Connect, Connection
from core.wire.grpc.deadlines import Deadlines
from core.wire.grpc.events import Ended
from core.wire.grpc.exchange import Exchange
from core.wire.grpc.limits import ChannelLimits


class Pool:
    """Connections to one worker, run in the channel's nursery. `name` is the worker's, for errors."""

    def __init__(self, nursery: trio.Nursery, connect: Connect, limits: ChannelLimits, name: str) -> None:
        self.deadlines = Deadlines()
        self._nursery = nursery
        self._connect = connect
        self._limits = limits
        self._name = name
        self._ready: list[Connection] = []
        self._opening: set[Connection] = set()
        self._ending: set[Connection] = set()  # retired, with calls or goodbyes on their way
        self._waiting: dict[Exchange, Connection | None] = {}  # in order
        self._failures = 0
        self._next_attempt = -math.inf
        self._closed = False
        self._changed = trio.Event()

    @property
    def connections(self) -> int:
        """Connections that can carry calls, or do."""
        return len(self._ready) + len(self._ending)

    @property
    def calls(self) -> int:
        """Calls on all connections, without those that wait for one."""
        return sum(connection.load for connection in (*self._ready, *self._ending))

    def pick(self) -> Connection | None:
        """The connection for a call that opens its stream at once; None: `acquire` has to be asked."""
        if self._waiting or self._closed:
            return None
        return self._least_loaded(self._limits.streams_per_connection)

    async def acquire(self, exchange: Exchange) -> Connection:
        """Wait for a connection with room; its stream has to be opened before the next checkpoint.

        Cancellation: the place in the queue is given up.

        Raises: `ConnectionLost` (`sent` is False) when connecting failed or the channel is closed, or what the exchange
        ended with meanwhile.
        """
        self._waiting[exchange] = None
        if self._closed:
            self._refuse(exchange, f"{self._name}: the channel is closed")
        try:
            connection = await self._turn(exchange)
        finally:
            granted = self._waiting.pop(exchange)
            if granted is not None:
                granted.reserved -= 1
        if connection is None:
            self._serve()
            exchange.raise_for_end()
            raise AssertionError("a call can't end well before it began")
        return connection

    async def settle(self) -> None:
        """Wait until the worker has read every cancellation that was sent. Cancellation: safe."""
        async with trio.open_nursery() as nursery:
            for connection in (*self._ready, *self._ending):
                nursery.start_soon(connection.settle)

    async def close(self) -> None:
        """End all calls and connections. Cancellation: what is left has to be cut."""
        self._closed = True
        for exchange in list(self._waiting):
            self._refuse(exchange, f"{self._name}: the channel is closed")
        for connection in [*self._ready, *self._opening, *self._ending]:
            connection.close("the channel is closed")
        while self._ready or self._opening or self._ending:
            self._changed = trio.Event()
            await self._changed.wait()

    # -- what connections tell --

    def on_ready(self, connection: Connection) -> None:
        """It can carry calls."""
        self._opening.discard(connection)
        self._ready.append(connection)
        self._failures = 0
        self._next_attempt = -math.inf
        self._serve()

    def on_room(self, connection: Connection) -> None:
        """It may take a call that it couldn't take before; or it never will again."""
        if connection.retired and connection in self._ready:
            self._ready.remove(connection)
            self._ending.add(connection)
        if self._waiting:
            self._serve()

    def on_lost(self, connection: Connection) -> None:
        """It's gone, and its calls have been told."""
        if connection in self._opening:
            self._opening.remove(connection)
            self._failed(connection.reason)
        elif connection in self._ready:
            self._ready.remove(connection)
        else:
            self._ending.discard(connection)
        self._changed.set()
        self._serve()

    def on_too_many_pings(self) -> None:
        """The worker closes a connection because it was asked too often whether it's there: ask half as often."""
        self._limits = structs.replace(self._limits, keepalive_interval=2 * self._limits.keepalive_interval)

    # -- private --

    async def _turn(self, exchange: Exchange) -> Connection | None:
        """Wait in the queue; None when the call has ended meanwhile."""
        while exchange.ended is None:
            self._serve()
            connection = self._waiting[exchange]
            if connection is None:
                await exchange.writable.wait()
            elif connection.takes_calls and connection.load <= connection.max_streams:
                return connection
            else:  # it went away, or took fewer calls, in the very tick in which it was granted
                connection.reserved -= 1
                self._waiting[exchange] = None
        return None

    def _serve(self) -> None:
        """Give connections to those who wait, in their order, as far as there are any."""
        for exchange, granted in self._waiting.items():
            if granted is None:
                connection = self._choose()
                if connection is None:
                    return
                connection.reserved += 1
                self._waiting[exchange] = connection
                exchange.writable.wake()

    def _choose(self) -> Connection | None:
        connection = self._least_loaded(self._limits.streams_per_connection)
        if connection is None and not self._grow():
            connection = self._least_loaded(math.inf)
        return connection

    def _least_loaded(self, limit: float) -> Connection | None:
        best = None
        for connection in self._ready:
            load = connection.load
            if load < limit and load < connection.max_streams and connection.takes_calls:
                best, limit = connection, load
        return best

    def _grow(self) -> bool:
        """Open connections for those who wait; whether that is worth waiting for."""
        if self._closed:
            return False
        usable = [connection for connection in self._ready if connection.takes_calls]
        demand = sum(connection.load for connection in usable)
        demand += sum(granted is None for granted in self._waiting.values())
        capacity = min([self._limits.streams_per_connection, *(connection.max_streams for connection in usable)])
        more = math.ceil(demand / max(capacity, 1)) - len(usable) - len(self._opening)
        more = min(more, self._limits.max_connections - len(self._ready) - len(self._opening))
        if self._failures:
            more = min(more, 1 - len(self._opening))
        for _ in range(more):
            connection = Connection(self, self._limits, self._name)
            self._opening.add(connection)
            self._nursery.start_soon(connection.run, self._connect, self._next_attempt)
        return bool(self._opening) and not (usable and self._failures)

    def _failed(self, reason: str) -> None:
        """An attempt to connect has failed. When nothing else is left, those who wait for it share its outcome."""
        limits = self._limits
        delay = min(limits.reconnect_delay * 2**self._failures, limits.reconnect_delay_max, limits.connect_timeout)
        self._failures += 1
        self._next_attempt = trio.current_time() + delay * random.uniform(0.8, 1.2)  # noqa: S311 - jitter
        if not self._ready and not self._opening:
            for exchange in self._waiting:
                self._refuse(exchange, reason)

    def _refuse(self, exchange: Exchange, reason: str) -> None:
        exchange.on_end(Ended(0, Status.UNAVAILABLE, reason, lost=True, unprocessed=True))
