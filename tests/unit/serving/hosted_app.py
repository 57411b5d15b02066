"""A small proxy for the hosting tests: each path does one thing, and what happens is printed as `event: …` lines.

`hypercorn tests.unit.serving.hosted_app` loads `app`; `python -m tests.unit.serving.hosted_app` runs `serve`. The environment variable
`HOSTED_APP` makes it misbehave: `broken` fails to open, `slow` takes for ever, `stubborn` does not close.
"""

import asyncio
import json
import os
import sys
from contextlib import asynccontextmanager, suppress

import sniffio
import trio

from core.beside import beside
from core.serving.application import Application
from core.serving.client import Clients, read_body
from core.serving.server import ServeOptions, serve

MIB = 1 << 20
_ticks = trio.Event()
_crash = trio.Event()


def event(text):
    print(f"event: {text}", flush=True)


async def start(send, status=200):
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"text/plain")]})


async def chunk(send, body, *, more=True):
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def proxy(scope, receive, send):
    body = await read_body(receive)
    await ROUTES[scope["path"]](scope["query_string"].decode(), body, receive, send)


async def echo(query, body, receive, send):
    await start(send)
    await chunk(send, body, more=False)


async def library(query, body, receive, send):
    await start(send)
    await chunk(send, sniffio.current_async_library().encode(), more=False)


async def size(query, body, receive, send):
    await start(send)
    await chunk(send, str(len(body)).encode(), more=False)


async def download(query, body, receive, send):
    await start(send)
    for _ in range(64):
        await chunk(send, b"x" * MIB)
    await chunk(send, b"", more=False)


async def two_chunks(query, body, receive, send):
    await start(send)
    await chunk(send, b"one")
    await _ticks.wait()
    await chunk(send, b"two", more=False)


async def tick(query, body, receive, send):
    _ticks.set()
    await start(send)
    await chunk(send, b"", more=False)


async def wait(query, body, receive, send):
    """Wait until the client goes; with `?stream`, after a first chunk."""
    try:
        async with Clients(60).connected(receive, send) as client:
            if query == "stream":
                await start(client.send)
                await chunk(client.send, b"one")
            event("waiting")
            await trio.sleep_forever()
        event(f"gone={client.gone}")
    finally:
        event("ended")


async def flood(query, body, receive, send):
    """Stream without end; a client that stalls for the seconds of the query is let go."""
    try:
        clients = Clients(float(query))
        async with beside(clients.run), clients.connected(receive, send) as client:
            client.release = lambda: event("released")
            await start(client.send)
            event("flooding")
            while True:
                await chunk(client.send, b"x" * MIB)
    finally:
        event("ended")


async def until_exists(query, body, receive, send):
    await start(send)
    await chunk(send, b"one")
    event("held")
    # The sign comes from another process, at a time when no connection is accepted.
    while not await trio.Path(query).exists():  # noqa: ASYNC110
        await trio.sleep(0.01)
    await chunk(send, b"two", more=False)


async def fail(query, body, receive, send):
    raise RuntimeError("the handler failed on purpose")


async def crash(query, body, receive, send):
    _crash.set()
    await start(send)
    await chunk(send, b"", more=False)


async def tasks(query, body, receive, send):
    count = {"trio": trio.lowlevel.current_statistics().tasks_living, "asyncio": 0}
    with suppress(RuntimeError):
        count["asyncio"] = len(asyncio.all_tasks())
    await start(send)
    await chunk(send, json.dumps(count).encode(), more=False)


ROUTES = {
    "/echo": echo,
    "/library": library,
    "/size": size,
    "/download": download,
    "/two-chunks": two_chunks,
    "/tick": tick,
    "/wait": wait,
    "/flood": flood,
    "/until-exists": until_exists,
    "/fail": fail,
    "/crash": crash,
    "/tasks": tasks,
}


async def _crashing():
    await _crash.wait()
    raise OSError("the fleet is lost")


@asynccontextmanager
async def open_proxy():
    behaviour = os.environ.get("HOSTED_APP")
    if behaviour == "broken":
        raise ValueError("no fleet today")
    if behaviour == "slow":
        event("opening")
        await trio.sleep_forever()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_crashing)
        try:
            yield proxy
        finally:
            event("closing")
            if behaviour == "stubborn":
                with trio.CancelScope(shield=True):
                    await trio.sleep_forever()
        nursery.cancel_scope.cancel()
    event("closed")


app = Application(open_proxy)

if __name__ == "__main__":
    sys.exit(serve(open_proxy, ServeOptions(port=int(sys.argv[1]), shutdown_timeout=float(sys.argv[2]))))
