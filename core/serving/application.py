"""The ASGI application: what `hypercorn core.app` loads.

One object for every kind of server: under a trio one (`hypercorn -k trio`) requests go straight to the proxy, under an asyncio one
(hypercorn's default) trio runs as a guest on the server's loop. The server's lifespan is the proxy's: it opens at startup and closes at
shutdown.

On SIGTERM hypercorn stops accepting, gives requests in flight its own `--graceful-timeout` (3 seconds unless told otherwise; `[server]
shutdown_timeout` is for `headrace serve`), cancels the rest, and only then sends the shutdown event. A second signal changes nothing.
What an application can't help: hypercorn 0.18 waits for a client that has stopped reading, under both workers, until the kernel gives the
connection up (the call is over by then, and its worker released); and it exits with 0 whatever its workers ended with. `headrace serve`
does neither.
"""

import traceback
from collections.abc import Iterator
from functools import partial
from typing import Final, cast

import msgspec
import sniffio

from core.errors import CallError
from core.serving.asgi import ASGIApp, Open, Receive, Scope, Send
from core.serving.guest import on_asyncio
from core.serving.single import claim_process

_NOT_OPEN: Final = (
    "headrace is not running: the server has sent no lifespan startup (or has already sent the shutdown); "
    "serve it with `headrace serve`, with hypercorn, or with another server that has lifespan support turned on"
)


class Application:
    """An ASGI 3 application around a proxy that `open_proxy` opens, always on trio.

    HTTP requests go to the proxy; an exception of its handler is the server's to log and to answer (500). WebSockets are refused. A
    request outside the lifespan is answered with 503 and says so.

    A proxy that can't start is a `lifespan.startup.failed`, with the reason; hypercorn ends then. A proxy that fails later ends the
    process (`SystemExit`, 1): a server that goes on without it would answer errors for ever and look alive.
    """

    def __init__(self, open_proxy: Open) -> None:
        self._open = open_proxy
        self._proxy: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One connection of the server, as ASGI 3 has it."""
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        else:
            await dispatch(self._proxy or _not_open, scope, receive, send)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        on_trio = sniffio.current_async_library() == "trio"
        opening = self._open if on_trio else partial(on_asyncio, self._open)
        started = False
        try:
            claim_process()
            async with opening() as self._proxy:
                await send({"type": "lifespan.startup.complete"})
                started = True
                await receive()
        except Exception as error:
            if started:
                traceback.print_exception(error)
                raise SystemExit(1) from error
            # Said from within the handler, so that the traceback that the server prints goes back to the cause; and with nothing awaited
            # after it, since hypercorn's asyncio worker looks only once whether the startup has failed.
            await send({"type": "lifespan.startup.failed", "message": f"headrace could not start: {reason(error)}"})
        else:
            await send({"type": "lifespan.shutdown.complete"})
        finally:
            self._proxy = None


async def dispatch(proxy: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """A connection of the server that is not the lifespan: HTTP goes to the proxy, a WebSocket is refused (403)."""
    kind = scope["type"]
    if kind == "http":
        await proxy(scope, receive, send)
    elif kind == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 1000})
    else:
        raise ValueError(f"ASGI scope {kind!r}: headrace speaks http and lifespan, and refuses websocket")


async def _not_open(_scope: Scope, _receive: Receive, send: Send) -> None:
    body = msgspec.json.encode(CallError(503, _NOT_OPEN).body)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def reason(error: BaseException) -> str:
    """An error in one line. Nurseries wrap what fails in them; the groups are opened, and each cause is named once."""
    return "; ".join(dict.fromkeys(_causes(error)))


def _causes(error: BaseException) -> Iterator[str]:
    if isinstance(error, BaseExceptionGroup):
        for cause in cast("BaseExceptionGroup[BaseException]", error).exceptions:
            yield from _causes(cause)
    else:
        yield f"{type(error).__name__}: {error}"
