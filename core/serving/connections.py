"""The connections of `headrace serve`: accepted here, spoken by hypercorn's asyncio worker, ended by us.

Hypercorn's own `serve` is not used, for two things that it gets wrong and we can't afford. A connection that its client has closed while
idle is kept, with its socket and tasks, until the keep-alive time-out: with a client that connects anew for each request, 75 seconds of
that are thousands of open files. And its shutdown waits, with no end, for a client that has stopped reading.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final, cast

from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config

from core.serving.asgi import ASGIApp

#: A training step ends and thousands of rollouts connect within one round trip; hypercorn's default of 100 drops most of their SYNs.
_BACKLOG: Final = 4096
#: More than the 60 seconds after which load balancers and pooling clients let go of an idle connection, so that the end that knows
#: whether it is about to send is the one that closes. (Hypercorn's 5 seconds end between two rollouts, under the next request.)
_KEEP_ALIVE: Final = 75.0
#: One trainer's calls over one HTTP/2 connection. With more open streams h2 slows down; clients open another connection instead.
_MAX_STREAMS: Final = 256
#: What cancelled requests have to send their last words, before their connections are cut.
_LAST_WORDS: Final = 1.0


class _Connection(TCPServer):
    """Hypercorn's connection, which ends when its client has closed it."""

    async def _read_data(self) -> None:
        await super()._read_data()
        await self.idle_task.stop()


class Connections:
    """Everything that is connected to one listening socket."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = ASGIWrapper(cast("Any", app))
        self._config = _config()
        self._context = WorkerContext(None)
        self._open: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._server: asyncio.Server | None = None

    async def accept(self, listener: socket.socket) -> None:
        """Begin to listen and to answer; the socket is ours from here on."""
        self._server = await asyncio.start_server(self._connected, sock=listener, backlog=_BACKLOG)

    async def finish(self, limit: Callable[[], Awaitable[object]]) -> None:
        """Stop accepting, close idle connections, and return when the last request has ended, or else when `limit()` returns.

        Cancellation: leaves `end` to do.
        """
        if self._server is not None:
            self._server.close()
        await self._context.terminated.set()
        waiting = asyncio.ensure_future(limit())
        try:
            while self._open and not waiting.done():
                await asyncio.wait((*self._open, waiting), return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()

    async def end(self) -> None:
        """Cancel the requests that still run, and cut every connection a second later."""
        if self._server is not None:
            self._server.close()
        for task in self._open:
            task.cancel()
        if self._open:
            await asyncio.wait(self._open, timeout=_LAST_WORDS)
        for writer in self._open.values():
            writer.transport.abort()
        if self._open:
            await asyncio.wait(self._open)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = cast("asyncio.Task[None]", asyncio.current_task())
        self._open[task] = writer
        task.add_done_callback(self._open.pop)
        # Only `end` cancels this task. Left cancelled, asyncio's streams would print a traceback for it (Python < 3.12).
        with suppress(asyncio.CancelledError):
            await _Connection(self._app, asyncio.get_running_loop(), self._config, self._context, {}, reader, writer)


def _config() -> Config:
    config = Config()
    config.keep_alive_timeout = _KEEP_ALIVE
    # Hypercorn makes the client reconnect after so many requests; nothing of ours grows with their number.
    config.keep_alive_max_requests = 1_000_000
    config.h2_max_concurrent_streams = _MAX_STREAMS
    config.loglevel = "WARNING"
    return config
