"""The connections of `headrace serve`: accepted here, and ended together."""

import errno
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

import trio
from hypercorn.config import Config
from hypercorn.trio.worker_context import WorkerContext

from core.serving.asgi import ASGIApp
from core.serving.connection import Connection

#: A training step ends and thousands of rollouts connect within one round trip; hypercorn's default of 100 drops most of their SYNs.
_BACKLOG: Final = 4096
#: More than the 60 seconds after which load balancers and pooling clients let go of an idle connection, so that the end that knows
#: whether it is about to send is the one that closes. (Hypercorn's 5 seconds end between two rollouts, under the next request.)
_KEEP_ALIVE: Final = 75.0
#: One trainer's calls over one HTTP/2 connection. With more open streams h2 slows down; clients open another connection instead.
_MAX_STREAMS: Final = 256
#: Without a file or memory for it, a connection waits in the backlog and is tried again after these seconds.
_NO_ROOM: Final = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_TRY_AGAIN: Final = 0.1


class Connections:
    """Everything that is connected to one listening socket, as tasks of `nursery`: cancelling that ends them all."""

    def __init__(self, app: ASGIApp, nursery: trio.Nursery) -> None:
        self._app = app
        self._nursery = nursery
        self._config = _config()
        self._context = WorkerContext(None)
        self._open: set[Connection] = set()
        self._ended = trio.lowlevel.ParkingLot()
        self._listener: socket.socket | None = None

    def accept(self, listener: socket.socket) -> None:
        """Begin to listen and to answer; the socket is ours from here on."""
        listener.setblocking(False)
        listener.listen(_BACKLOG)
        self._listener = listener
        self._nursery.start_soon(self._accept, listener)

    async def finish(self) -> None:
        """Stop accepting, close idle connections, and return when the last request has ended.

        Cancellation: requests go on; nobody is accepted any more.
        """
        if self._listener is not None:
            trio.lowlevel.notify_closing(self._listener)
            self._listener.close()
        await self._context.terminated.set()
        for connection in self._open:
            connection.close_if_idle()
        while self._open:
            await self._ended.park()

    async def _accept(self, listener: socket.socket) -> None:
        with listener, suppress(trio.ClosedResourceError):
            while True:
                await trio.lowlevel.wait_readable(listener)
                try:
                    for accepted, client in _accepted(listener):
                        connection = Connection(accepted, client, self._app, self._config, self._context)
                        self._open.add(connection)
                        self._nursery.start_soon(self._serve, connection)
                except OSError as error:
                    if error.errno not in _NO_ROOM:
                        raise
                    await self._config.log.warning("cannot accept connections: %s", error.strerror)
                    await trio.sleep(_TRY_AGAIN)

    async def _serve(self, connection: Connection) -> None:
        try:
            await connection.run()
        finally:
            self._open.remove(connection)
            self._ended.unpark()


def _accepted(listener: socket.socket) -> Iterator[tuple[socket.socket, Any]]:
    """All connections that wait. Raises `OSError` when there is no room for one."""
    while True:
        try:
            yield listener.accept()
        except BlockingIOError:
            return
        except ConnectionError:
            continue


def _config() -> Config:
    config = Config()
    config.keep_alive_timeout = _KEEP_ALIVE
    # Hypercorn makes the client reconnect after so many requests; nothing of ours grows with their number.
    config.keep_alive_max_requests = 1_000_000
    config.h2_max_concurrent_streams = _MAX_STREAMS
    config.loglevel = "WARNING"
    return config
