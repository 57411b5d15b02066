"""The server behind `headrace serve`: hypercorn's asyncio worker in this process, with trio as its guest.

Of hypercorn's two workers the asyncio one is the cheaper host, even with trio on top of it: 0.21 ms of CPU a small request against 0.42,
17 µs a streamed chunk against 41 (32 connections; with a single one 0.47 against 0.42, for guest mode waits in a thread). And its `send()`
can be cancelled.

Hypercorn brings HTTP/1.1 and HTTP/2 (see `core/serving/connections.py`); the way up and the way down are here.
"""

import asyncio
import faulthandler
import signal
import socket
import sys
import traceback
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final, cast

from core.serving.application import dispatch, reason
from core.serving.asgi import ASGIApp, Open
from core.serving.connections import Connections
from core.serving.guest import on_asyncio

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
        return asyncio.run(_Server(open_proxy, listener, options).run())
    finally:
        faulthandler.cancel_dump_traceback_later()


def _bind(options: ServeOptions) -> socket.socket:
    """The listening socket, not listening yet. Accepted sockets inherit its options (Linux)."""
    family, _, _, _, address = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # asyncio turns Nagle's algorithm off only for sockets that were made with a protocol number. With it on, the body of a reply would
        # wait for the client's delayed acknowledgement of the headers: 40 ms.
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
        self._stop = asyncio.Event()
        self._at_once = asyncio.Event()
        self._opening: asyncio.Task[int] | None = None

    async def run(self) -> int:
        self._opening = cast("asyncio.Task[int]", asyncio.current_task())
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)
        try:
            async with on_asyncio(self._open) as proxy:
                self._opening = None
                await self._host(proxy)
        except asyncio.CancelledError:
            if not self._stop.is_set():
                raise
        except Exception as error:  # noqa: BLE001 - the end of the process, whatever it was
            traceback.print_exception(error)
            sys.stderr.write(f"headrace {'could not start' if self._opening else 'failed'}: {reason(error)}\n")
            return 1
        finally:
            self._listener.close()
        return 0

    def _signalled(self) -> None:
        if self._stop.is_set():
            self._at_once.set()
        self._stop.set()
        if self._opening is not None:
            faulthandler.dump_traceback_later(_CLOSE_GRACE, exit=True)
            self._opening.cancel()

    async def _host(self, proxy: ASGIApp) -> None:
        """Answer requests until the first signal, and finish them until the second or the limit."""
        connections = Connections(partial(dispatch, proxy))
        host, port = self._listener.getsockname()[:2]
        try:
            await connections.accept(self._listener)
            sys.stderr.write(f"headrace listening on http://{f'[{host}]' if ':' in host else host}:{port}\n")
            await self._stop.wait()
            await connections.finish(self._limit)
        finally:
            faulthandler.dump_traceback_later(_CLOSE_GRACE, exit=True)
            await connections.end()

    async def _limit(self) -> None:
        """Return when requests in flight are waited for no longer."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._options.shutdown_timeout):
                await self._at_once.wait()
