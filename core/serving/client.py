"""Whoever sent a request: its body, its going away, its not reading on.

ASGI tells of a disconnect only to somebody who awaits `receive()`, and `send` stays silent about it, so one task waits there from the
moment the body is complete (`headrace serve` calls a function instead). And a server's `send()` need not end when it is cancelled
(hypercorn's trio worker shields it), so a client that stops reading would pin the handler and, with it, the worker's stream. Neither is
waited for here: the upstream is released from outside.
"""

import math
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

import trio

from core.beside import beside
from core.errors import CallError, ClientGone
from core.serving.asgi import Message, Receive, Send
from core.serving.inbox import Inbox

MIB: Final = 1 << 20


async def read_body(receive: Receive, limit: int = 64 * MIB, *, declared: str | None = None, timeout: float = 60.0) -> bytes:
    """The whole body of a request, at most `limit` bytes. `declared` is its Content-Length; `timeout`, in seconds, is for each next part.

    Raises `ClientGone` when the client leaves before the end, and a `CallError`: with 408 when nothing more of the body comes, with 413 for
    one that is too large, at once when it is declared to be. Where a server must have the whole body before the answer (`Inbox.early`), up
    to `limit` bytes more are read and dropped first: one that closes with bytes unread resets the connection, and the client would see that
    instead of the answer.

    Cancellation: what has been read is lost.
    """
    chunks: list[bytes] = []
    size = 0
    too_large = declared is not None and declared.isdecimal() and int(declared) > limit
    early = isinstance(receive, Inbox) and receive.early
    most = limit if early else 2 * limit
    more = not (too_large and early)
    with trio.CancelScope(deadline=trio.current_time() + timeout) as waiting:
        while more and size <= most:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            chunk: bytes = message.get("body", b"")
            size += len(chunk)
            too_large = too_large or size > limit
            if too_large:
                chunks.clear()
            else:
                chunks.append(chunk)
            if more := message.get("more_body", False):
                waiting.deadline = trio.current_time() + timeout
    if too_large:
        raise CallError(
            413, f"the request body is larger than {limit / MIB:g} MiB; `max_body_mib` under [server] in headrace.toml sets this limit"
        )
    if waiting.cancelled_caught:
        raise CallError(408, f"nothing of the request body came for {timeout:g} seconds; `body_timeout` under [server] sets this limit")
    return b"".join(chunks)


class Client:
    """The client of one request, see `Clients.connected`."""

    #: The client has closed its connection before the reply was complete.
    gone: bool = False
    #: The client has not taken a message within the stall time-out.
    stalled: bool = False
    #: The response has begun.
    started: bool = False
    #: Nothing more is done for the client, which is there, because headrace ends.
    ended: bool = False

    def __init__(self, send: Send) -> None:
        self._send = send
        self._sending_since = math.inf
        self._complete = False
        #: What is done for the client; cancelled when it is lost.
        self.scope = trio.CancelScope()
        self._held: float | None = None
        #: Called once, from another task, when the client is lost (or the handler cancelled) while a `send` is pending, because that
        #: `send` may keep the handler for ever. It releases what the handler holds upstream; it neither blocks nor raises.
        self.release: Callable[[], object] = _nothing
        #: Says that to the client.
        self.farewell: Callable[[], Awaitable[None]] = _silently
        #: Ends with an error, as far as that can be, a response that has begun and that nobody goes on with.
        self.break_off: Callable[[CallError], Awaitable[None]] | None = None

    async def send(self, message: Message) -> None:
        """ASGI's `send`, with the time noted."""
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self._complete = True
        self._sending_since = trio.current_time()
        try:
            await self._send(message)
            self.started = True
        finally:
            self._sending_since = math.inf

    @property
    def lost(self) -> bool:
        """Whether the client is `gone` or `stalled`."""
        return self.gone or self.stalled

    def hold(self, seconds: float) -> None:
        """Until `let_go`, let what is done go on for so many seconds when the client is lost."""
        self._held = seconds

    def let_go(self) -> None:
        """End a `hold`, and what is done for a client that was lost meanwhile."""
        self._held = None
        if self.lost:
            self.scope.cancel()

    def leave(self) -> None:
        """The client has gone. Servers also say so once the reply is complete; then it means nothing."""
        if not self._complete and not self.lost:
            self.gone = True
            self._lose()

    def end(self) -> None:
        """Do nothing more for the client than its `farewell`."""
        if not self._complete and not self.lost:
            self.ended = True
            self.scope.cancel()

    def check(self, latest: float) -> None:
        """Lose the client if a `send` is pending that has begun before `latest`."""
        if self._sending_since < latest and not self.lost:
            self.stalled = True
            self._lose()

    async def watch(self, receive: Receive) -> None:
        """Wait for the client to leave. Cancellation is that of the handler, which a pending `send` may keep from taking notice."""
        try:
            while (await receive())["type"] != "http.disconnect":
                pass
            self.leave()
        finally:
            self._release()

    def _lose(self) -> None:
        if self._held is None:
            self.scope.cancel()
        else:
            self.scope.deadline = trio.current_time() + self._held
        self._release()

    def _release(self) -> None:
        if self._sending_since < math.inf:
            release, self.release = self.release, _nothing
            release()


def _nothing() -> None:
    pass


async def _silently() -> None:
    pass


class Clients:
    """All clients that are being answered. `stall_timeout`, in seconds: one that takes nothing for so long is lost."""

    def __init__(self, stall_timeout: float) -> None:
        self._stall_timeout = stall_timeout
        self._connected: set[Client] = set()
        self._nobody = trio.lowlevel.ParkingLot()

    @asynccontextmanager
    async def connected(self, receive: Receive, send: Send) -> AsyncGenerator[Client]:
        """Run the body of the `async with` for as long as the client is there and reads.

        For after `read_body`: from here on nobody else awaits `receive`. When the client closes its connection, or leaves one `send`
        pending for the stall time-out, the body is cancelled, and the block ends without an exception, with `gone` or `stalled` set; so it
        does with `ended`, when the client has had its `farewell`. An exception of the body comes out as it is, in no group.

        Costs a task for the request, unless the server tells of the client's going by itself (`Inbox`), and for each message the reading
        of a clock.
        """
        client = Client(send)
        self._connected.add(client)
        try:
            with client.scope:
                if isinstance(receive, Inbox):
                    receive.on_disconnect(client.leave)
                    yield client
                else:
                    async with beside(partial(client.watch, receive)):
                        yield client
            if client.ended:
                await client.farewell()
        finally:
            self._connected.discard(client)
            if not self._connected:
                self._nobody.unpark_all()

    async def end(self) -> None:
        """End what is done for each client, and return when each has had its farewell. Cancellation: some may not have had it."""
        for client in self._connected:
            client.end()
        while self._connected:
            await self._nobody.park()

    async def run(self) -> None:
        """Look for clients that stall, four times within the time-out, until cancelled."""
        while True:
            await trio.sleep(self._stall_timeout / 4)
            latest = trio.current_time() - self._stall_timeout
            for client in list(self._connected):
                client.check(latest)
