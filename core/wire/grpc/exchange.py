"""One RPC between its caller and whichever connection carries it.

Connections push into it (`on_…`, plain functions), the caller's tasks pull. It outlives a connection: a call with one
request that the worker has certainly not looked at moves to another one.
"""

import math
from collections import deque
from typing import TYPE_CHECKING

import trio
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from core.wire.grpc.errors import ConnectionLost
from core.wire.grpc.events import Ended
from core.wire.grpc.headers import HeaderList, encode_timeout
from core.wire.grpc.messages import PREFIX
from core.wire.grpc.signals import Signal

if TYPE_CHECKING:
    from core.wire.grpc.connection import Connection
    from core.wire.grpc.pool import Pool

ATTEMPTS = 5
"""How often a call is made when the worker refuses it unseen each time."""

_PAUSE = 0.001
"""Seconds before the second attempt, four times as long before each later one. A worker that refuses streams at its
limit may count one for a moment longer than we do."""


class Exchange:
    """The state of one RPC. `single_reply`: the method answers with exactly one message."""

    __slots__ = (
        "_attempts",
        "_awaits_head",
        "_body",
        "_headers",
        "_refused",
        "_starting",
        "_timer",
        "_unread",
        "connection",
        "deadline",
        "ended",
        "head",
        "messages",
        "pool",
        "readable",
        "single_reply",
        "stream_id",
        "writable",
    )

    def __init__(self, pool: "Pool", headers: list[tuple[bytes, bytes]], *, deadline: float, single_reply: bool) -> None:
        self.pool = pool
        self.deadline = deadline
        self.single_reply = single_reply
        self.connection: Connection | None = None
        self.stream_id = 0
        self.head: HeaderList | None = None
        self.messages: deque[bytes] = deque()
        self.ended: Ended | None = None
        self.readable = Signal()
        self.writable = Signal()
        self._headers = headers
        self._body: bytes | None = None
        self._awaits_head = False
        self._attempts = 0
        self._refused = False  # by the worker, unseen: to be made again by whoever starts it or waits for it
        self._starting = False
        self._unread = 0
        self._timer = None if deadline == math.inf else pool.deadlines.add(deadline, self._expire)

    # -- the caller's side --

    async def start(self, body: bytes | None, *, end: bool) -> None:
        """Open the stream on some connection, and send `body` (already framed) if there is one.

        A `body` with `end` is kept, so that the call can be made again on another connection.

        Cancellation: the caller has to `close` the exchange, as always.

        Raises: `GRPCError` when the call is over before everything was sent; not when it ended well.
        """
        self._body = body if end else None
        self._starting = True
        try:
            while True:
                if self._attempts:
                    await trio.sleep(_PAUSE * 4 ** (self._attempts - 1))
                if self.deadline <= trio.current_time():
                    self._expire()
                self.raise_for_end()
                self._refused = False
                self._attempts += 1
                await self._open(end=end and body is None)
                if body is not None:
                    await self.send(body, end=end)
                if not self._refused:
                    return
        finally:
            self._starting = False

    async def send(self, data: bytes, *, end: bool) -> None:
        """Send framed bytes, in pieces as the worker's windows allow.

        Cancellation: the call can only be closed, as part of a message may have left.

        Raises: `GRPCError` when the call has failed. When it ended well, what it doesn't want is dropped.
        """
        view = memoryview(data)
        while self.connection is not None:
            sent = self.connection.send(self, view, end=end)
            if sent == len(view):
                return
            view = view[sent:]
            await self.writable.wait()
        self.raise_for_end()

    async def wait_for_reply(self) -> None:
        """Sleep until there is a message, or the end; for `single_reply`, until the end.

        Cancellation: nothing is lost.
        """
        while self.ended is None and (self.single_reply or not self.messages):
            await self._wait()

    async def wait_for_head(self) -> None:
        """Sleep until the reply has begun, or the call is over. Cancellation: nothing is lost."""
        self._awaits_head = True
        while self.ended is None and self.head is None:
            await self._wait()
        self._awaits_head = False

    async def wait_for_end(self) -> None:
        """Sleep until the call is over; messages of a streamed reply are dropped. Cancellation: they stay dropped."""
        while self.ended is None:
            if not self.single_reply:
                self.take_all()
            await self._wait()

    def take(self) -> bytes:
        """The next message; there must be one."""
        message = self.messages.popleft()
        self._took(len(message) + PREFIX)
        return message

    def take_all(self) -> list[bytes]:
        """All messages that are there."""
        messages = list(self.messages)
        self.messages.clear()
        self._took(self._unread)
        return messages

    def raise_for_end(self) -> None:
        """Raise what the call ended with, unless it ended well (or goes on).

        Raises: `ConnectionLost` or another `GRPCError`, a new one each time.
        """
        ended = self.ended
        if ended is None or ended.status is Status.OK:
            return
        if ended.lost:
            raise ConnectionLost(ended.message or "", sent=not ended.unprocessed)
        raise GRPCError(ended.status, ended.message, ended.details)

    def fail(self, status: Status, message: str) -> None:
        """End the call from our side: the worker gets RST_STREAM(CANCEL), whoever waits gets the error."""
        if self.ended is None:
            stream_id = self.stream_id
            if self.connection is not None:
                self.connection.reset(self)
            self.on_end(Ended(stream_id, status, message))

    def close(self) -> None:
        """The caller leaves: cancel what goes on. Does nothing the second time."""
        if self.ended is None:
            self.fail(Status.CANCELLED, "the call was cancelled")
        if self._timer is not None:
            self._timer.cancel()

    # -- the connection's side --

    def on_message(self, message: bytes) -> None:
        """A message came."""
        if self.single_reply and self.messages:
            self.fail(Status.INTERNAL, "more than one message came in reply to a unary call")
            return
        self.messages.append(message)
        self._unread += len(message) + PREFIX
        if not self.single_reply:
            self.readable.wake()

    def on_head(self, headers: HeaderList) -> None:
        """The reply began: the worker has the call, so it can't be made again."""
        self.head = headers
        self._body = None
        if self._awaits_head:
            self.readable.wake()

    def on_end(self, ended: Ended) -> None:
        """The call is over on this connection; only the first end counts."""
        if self.ended is not None:
            return
        on_connection, self.connection = self.connection is not None, None
        if ended.unprocessed and on_connection and self._body is not None and self._attempts < ATTEMPTS:
            self._refused = True
            self.writable.wake()
            if not self._starting:
                self.readable.wake()
            return
        if self.single_reply and ended.status is Status.OK and not self.messages:
            ended = Ended(ended.stream_id, Status.INTERNAL, "the call ended well but without a message")
        self.ended = ended
        self.readable.wake()
        self.writable.wake()

    # -- private --

    async def _open(self, *, end: bool) -> None:
        connection = self.pool.pick() or await self.pool.acquire(self)
        headers = self._headers
        if self.deadline != math.inf:
            headers = [*headers, encode_timeout(self.deadline - trio.current_time())]
        connection.open(self, headers, end=end)

    async def _wait(self) -> None:
        if self._starting or not self._refused:
            await self.readable.wait()
        if self._refused and not self._starting:
            await self.start(self._body, end=True)

    def _took(self, size: int) -> None:
        self._unread -= size
        if self.connection is not None:
            self.connection.took(self, size)

    def _expire(self) -> None:
        self.fail(Status.DEADLINE_EXCEEDED, "the call's deadline passed")
