"""The server behind `headrace serve`: trio alone, with HTTP/1.1 and hypercorn's HTTP/2 on sockets of our own.

Neither of hypercorn's workers is used. Under the asyncio one trio is a guest, which waits for everything in a thread; both keep a
connection that its client has closed while idle until the keep-alive time-out (with a client that connects anew for each request, 75
seconds of that are thousands of open files), and their shutdown waits, with no end, for a client that has stopped reading.

The connections are in `core/serving/connections.py`; the way up and the way down are here.
"""

import faulthandler
import signal
import socket
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import trio

from core.beside import beside
from core.serving.application import dispatch, reason
from core.serving.asgi import ASGIApp, Ending, Open
from core.serving.connections import Connections
from core.settings import SettingsError

#: For what is left of requests and for the proxy to close: workers are told, plugins end. Then the process ends where it stands.
_CLOSE_GRACE: Final = 5.0


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Where to listen and how to stop; [server] in headrace.toml."""

    host: str = "127.0.0.1"
    #: 0 takes a free port.
    port: int = 8000
    #: Seconds that requests in flight may go on after the first signal.
    shutdown_timeout: float = 30.0
    #: Seconds after which the kernel gives up a connection whose client takes nothing, or has vanished.
    stall_timeout: float = 60.0


def serve(open_proxy: Open, options: ServeOptions) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code of the process. Call it from the main thread, outside of any event loop.

    Prints `headrace listening on http://HOST:PORT` on stderr once requests are answered; before that, connecting is refused.

    The first signal stops accepting and closes idle connections; requests in flight may finish within `shutdown_timeout`, then they are
    cancelled. A second signal cancels them at once. Then the proxy closes. None of this waits for a client; should the closing itself
    hang, the process ends 5 seconds later with the stack of every thread on stderr and exit code 1.

    Exit codes: 0 after a signal; 1, with the reason on stderr, if the address can't be had, the proxy can't start, or it fails.
    """
    try:
        listener = _bind(options)
    except OSError as error:
        sys.stderr.write(
            f"headrace: cannot listen on {options.host}:{options.port}: {error.strerror or error}; choose another [server] host or port\n"
        )
        return 1
    try:
        return trio.run(_Server(open_proxy, listener, options).run)
    finally:
        faulthandler.cancel_dump_traceback_later()


def serve_on_port(app: ASGIApp, *, host: str, port: int) -> Callable[[], Awaitable[None]]:
    """Take a port beside headrace's own; what is returned answers there by `app`, under any host, until it is cancelled.

    Cancellation: requests in flight are cancelled, connections closed.
    Raises: `OSError` when the address can't be had.
    """
    listener = _bind(ServeOptions(host=host, port=port))

    async def serve_it() -> None:
        async with trio.open_nursery() as nursery:
            Connections(partial(dispatch, app), nursery).accept(listener)

    return serve_it


def _bind(options: ServeOptions) -> socket.socket:
    """The listening socket, not listening yet. Accepted sockets inherit its options (Linux)."""
    family, _, _, _, address = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # With Nagle's algorithm a token would wait for the client's delayed acknowledgement of the one before: 40 ms.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A client that takes no bytes keeps its connection's task and buffers until the kernel gives up: by default after many minutes.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(options.stall_timeout * 1000))
        # And one that has vanished while it waits for a long rollout is noticed only if it is asked.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, round(options.stall_timeout)))
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, round(options.stall_timeout / 4)))
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener


class _Server:
    """One run of `serve`."""

    def __init__(self, open_proxy: Open, listener: socket.socket, options: ServeOptions) -> None:
        self._open = open_proxy
        self._listener = listener
        self._options = options
        self._stop = trio.Event()
        #: Requests in flight are waited for within this scope, which a second signal cancels.
        self._grace = trio.CancelScope()
        self._opening = trio.CancelScope()
        self._opened = False

    async def run(self) -> int:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async with beside(partial(self._heed, signals)):
                return await self._run()

    async def _heed(self, signals: AsyncIterator[int]) -> None:
        async for _ in signals:
            if self._stop.is_set():
                self._grace.cancel()
            self._stop.set()
            if not self._opened:
                faulthandler.dump_traceback_later(_CLOSE_GRACE, exit=True)
                self._opening.cancel()

    async def _run(self) -> int:
        try:
            with self._listener, self._opening:
                async with self._open() as proxy:
                    self._opened = True
                    await self._host(proxy)
        except Exception as error:  # noqa: BLE001 - the end of the process, whatever it was
            if not isinstance(error, SettingsError):  # that says by itself what to do
                traceback.print_exception(error)
            sys.stderr.write(f"headrace {'failed' if self._opened else 'could not start'}: {reason(error)}\n")
            return 1
        return 0

    async def _host(self, proxy: ASGIApp) -> None:
        """Answer requests until the first signal, and finish them until the second or the limit."""
        host, port = self._listener.getsockname()[:2]
        async with trio.open_nursery() as nursery:
            try:
                connections = Connections(partial(dispatch, proxy), nursery)
                connections.accept(self._listener)
                sys.stderr.write(f"headrace listening on http://{f'[{host}]' if ':' in host else host}:{port}\n")
                await self._stop.wait()
                if isinstance(proxy, Ending):
                    proxy.stop()
                self._grace.deadline = trio.current_time() + self._options.shutdown_timeout
                with self._grace:
                    await connections.finish()
                faulthandler.dump_traceback_later(_CLOSE_GRACE, exit=True)
                if isinstance(proxy, Ending):
                    await proxy.end()
            finally:
                faulthandler.dump_traceback_later(_CLOSE_GRACE, exit=True)
                nursery.cancel_scope.cancel()
