"""One connection of `headrace serve`: HTTP/1.1, or one of hypercorn's protocols (HTTP/2), on a trio socket of our own.

Hypercorn's own trio connection is slower, for it starts a task whenever the connection becomes idle and takes a lock and a turn of the
scheduler for every write; it can't be cancelled while it sends; and it writes the head of a response by itself. Here a connection is one
task that reads, with one deadline, and a request is one task more. What is sent goes to the socket in the task that sends it, with no
turn of the scheduler unless the socket is full.
"""

import math
import socket
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import islice
from typing import Any, Final, cast

import trio
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol import ProtocolWrapper
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from hypercorn.utils import parse_socket_addr  # pyright: ignore[reportUnknownVariableType]

from core.serving.asgi import ASGIApp, Message, Scope
from core.serving.http1 import HTTP1
from core.serving.inbox import Inbox

#: Bytes of one read.
_READ: Final = 1 << 16
#: A connection that is closed with bytes unread is reset, and its client may lose the answer. So what a client still sends after an answer
#: that came before the end of its request is read and dropped: while it sends, and altogether so long, in seconds.
_LINGER_BETWEEN: Final = 2.0
_LINGER: Final = 30.0
#: Pieces of one write: the head and the body of a response, or frames of HTTP/2. (Linux takes 1024.)
_PIECES: Final = 64


class Connection:
    """One accepted socket until its end, see `run`. To hypercorn's protocols it is also their task group."""

    def __init__(self, accepted: socket.socket, client: Any, app: ASGIApp, config: Config, context: WorkerContext) -> None:
        accepted.setblocking(False)
        self._socket = accepted
        self._app = app
        self._config = config
        self._context = context
        #: Reading; its deadline is the end of the keep-alive time, and infinite while there is a request.
        self._reading = trio.CancelScope(deadline=trio.current_time() + config.keep_alive_timeout)
        self._unsent: deque[bytes | memoryview] = deque()
        self._drain = trio.Lock()
        self._hold = False
        self._lost = False
        self._tasks: trio.Nursery
        self._addresses = parse_socket_addr(accepted.family, client), parse_socket_addr(accepted.family, accepted.getsockname())
        self._protocol: HTTP1 | ProtocolWrapper | None = None

    async def run(self) -> None:
        """Read and answer until either side closes, or the keep-alive time is over; returns when the last handler has ended.

        Cancellation: handlers are cancelled; a request that has no answer yet gets a 503, or a 500 if nobody has said that the
        server ends; if the socket takes it at once.
        """
        with self._socket:
            try:
                async with trio.open_nursery() as self._tasks:
                    with self._reading:
                        await self._read()
                    linger = not self._lost and isinstance(self._protocol, HTTP1) and self._protocol.unread
                    if self._protocol:
                        await self._protocol.handle(Closed())
                if linger:
                    await self._linger()
            except Exception:  # noqa: BLE001 - whatever a client's bytes do to a protocol, other connections go on
                await self._config.log.exception("Error in a connection")

    def close_if_idle(self) -> None:
        """Close the connection unless there is a request on it."""
        if self._reading.deadline < math.inf:
            self._reading.cancel()

    async def _read(self) -> None:
        while True:
            await trio.lowlevel.wait_readable(self._socket)
            if self._reading.cancel_called:
                return
            try:
                data = self._socket.recv(_READ)
            except BlockingIOError:
                continue
            except OSError:
                return
            if self._protocol is None:
                self._protocol = self._protocol_for(data)
            await self._protocol.handle(RawData(data))
            if not data:
                return

    async def _linger(self) -> None:
        """Say that nothing more comes, and drop what does."""
        with suppress(OSError), trio.move_on_after(_LINGER_BETWEEN) as waiting:
            self._socket.shutdown(socket.SHUT_WR)
            latest = trio.current_time() + _LINGER
            received = True
            while received:
                await trio.lowlevel.wait_readable(self._socket)
                with suppress(BlockingIOError):
                    received = bool(self._socket.recv(_READ))
                waiting.deadline = min(trio.current_time() + _LINGER_BETWEEN, latest)

    def _protocol_for(self, first: bytes) -> HTTP1 | ProtocolWrapper:
        """By the first bytes: what begins as anything but plain HTTP/1.1 is hypercorn's, HTTP/2 above all."""
        if not first.startswith(b"PRI") and b"\r\nupgrade:" not in first.lower():
            return HTTP1(self._config, self._context, self._addresses, self._begin, self._send)
        to_app, to_tasks = cast("Any", self._app), cast("Any", self)
        return ProtocolWrapper(to_app, self._config, self._context, to_tasks, ConnectionState({}), False, *self._addresses, self._send)

    async def _send(self, event: Event) -> None:
        """What hypercorn's protocols send: bytes, the end, and whether there is a request."""
        if isinstance(event, RawData):
            if event.data and not self._lost:
                self._unsent.append(event.data)
            if not self._hold:
                await self._flush()
        elif isinstance(event, Closed):
            await self._flush()
            self._reading.cancel()
        elif isinstance(event, Updated):
            self._reading.deadline = trio.current_time() + self._config.keep_alive_timeout if event.idle else math.inf
            if self._context.terminated.is_set():
                self.close_if_idle()

    async def _flush(self) -> None:
        """Return when the socket has taken everything. Cancellation: what is left is written before anything that is sent later."""
        if not self._drain.locked():
            self._write()
        while self._unsent:
            async with self._drain:
                if self._unsent:
                    await trio.lowlevel.wait_writable(self._socket)
                    self._write()

    def _write(self) -> None:
        """Write as much as the socket takes."""
        unsent = self._unsent
        try:
            while unsent:
                sent = self._socket.sendmsg(islice(unsent, _PIECES))
                while unsent and sent >= len(unsent[0]):
                    sent -= len(unsent.popleft())
                if sent:
                    unsent[0] = memoryview(unsent[0])[sent:]
        except BlockingIOError:
            pass
        except OSError:
            self._lost = True
            unsent.clear()
            self._reading.cancel()

    def spawn(self, function: Callable[..., Awaitable[object]], *args: object) -> None:
        """Hypercorn's task group: run a task of the protocol."""
        self._tasks.start_soon(function, *args)

    async def spawn_app(
        self, _app: object, _config: Config, scope: Any, send: Callable[[Any], Awaitable[None]]
    ) -> Callable[[Any], Awaitable[None]]:
        """Hypercorn's task group: run the handler of a request; returns what takes the messages for it."""
        return await self._begin(scope, send)

    async def _begin(
        self, scope: Scope, send: Callable[[Any], Awaitable[None]], want: Callable[[], Awaitable[None]] | None = None
    ) -> Callable[[Any], Awaitable[None]]:
        inbox = Inbox(want)
        self._tasks.start_soon(self._answer, scope, inbox, send)
        return inbox.put

    async def _answer(self, scope: Scope, inbox: Inbox, send: Callable[[Message | None], Awaitable[None]]) -> None:
        async def app_send(message: Message) -> None:
            await trio.lowlevel.checkpoint_if_cancelled()
            # As ASGI wants it, the head goes with the first of the body: one write and one packet. Nothing suspends while it is held.
            self._hold = message["type"] == "http.response.start"
            try:
                await send(message)
            finally:
                self._hold = False

        try:
            await self._app(scope, inbox, app_send)
        except Exception:  # noqa: BLE001 - the server's to log and to answer, whatever it is
            await self._config.log.exception("Error in ASGI Framework")
        finally:
            inbox.close()
            await send(None)
