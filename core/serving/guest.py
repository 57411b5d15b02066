"""Trio as a guest on the event loop of an asyncio server.

`hypercorn core.app` starts hypercorn's asyncio worker, and headrace is trio. `on_asyncio` starts one trio run on the server's loop and
turns the trio application into an asyncio one: each HTTP request becomes a trio task, whose `receive` and `send` run the server's
coroutines; `core/serving/crossing.py` has the how.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

import outcome
import trio

from core.serving.asgi import ASGIApp, Open, Receive, Scope, Send
from core.serving.crossing import ServerCalls

T = TypeVar("T")


@asynccontextmanager
async def on_asyncio(open_proxy: Open) -> AsyncGenerator[ASGIApp]:
    """Open a trio application on the running asyncio loop, and offer it as an asyncio one.

    Leaving the context closes the proxy, cancels requests that still run, and ends the trio run before the loop goes on; so does a
    cancellation. When the proxy fails, the body is cancelled and its error is raised (in an `ExceptionGroup`).
    """
    loop = asyncio.get_running_loop()
    opened: asyncio.Future[tuple[ASGIApp, trio.Nursery]] = loop.create_future()
    closing = trio.Event()

    async def hold() -> None:
        async with open_proxy() as app, trio.open_nursery() as calls:
            if not opened.done():  # cancelled, when the server gave up in the meantime
                opened.set_result((app, calls))
            await closing.wait()
            calls.cancel_scope.cancel()

    async with asyncio.TaskGroup() as group:
        group.create_task(_guest_run(hold), name="headrace")
        app, calls = await opened

        async def asgi(scope: Scope, receive: Receive, send: Send) -> None:
            ended: asyncio.Future[outcome.Outcome[None]] = loop.create_future()
            cancel = trio.CancelScope()
            server = ServerCalls(receive, send)
            calls.start_soon(_call, partial(app, scope, server.receive, server.send), cancel, ended)
            await _uncancelled(ended, cancel)

        yield asgi
        closing.set()


async def _guest_run(main: Callable[[], Awaitable[None]]) -> None:
    """Run trio in guest mode to its end."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[outcome.Outcome[None]] = loop.create_future()
    cancel = trio.CancelScope()

    async def cancellable() -> None:
        with cancel:
            await main()

    trio.lowlevel.start_guest_run(
        cancellable,
        run_sync_soon_threadsafe=loop.call_soon_threadsafe,
        run_sync_soon_not_threadsafe=loop.call_soon,
        done_callback=ended.set_result,
        host_uses_signal_set_wakeup_fd=True,
    )
    await _uncancelled(ended, cancel)


async def _call(app: Callable[[], Awaitable[None]], cancel: trio.CancelScope, ended: "asyncio.Future[outcome.Outcome[None]]") -> None:
    """One request as a trio task. Its exception belongs to the server's task, never to the nursery of the others."""
    result: outcome.Outcome[None] = outcome.Error(asyncio.CancelledError())
    try:
        with cancel:
            try:
                result = outcome.Value(await app())
            except Exception as error:  # noqa: BLE001 - carried over whatever it is
                result = outcome.Error(error)
    finally:
        ended.set_result(result)


async def _uncancelled(ended: "asyncio.Future[outcome.Outcome[T]]", cancel: trio.CancelScope) -> T:
    """Wait for the end of something on trio; a cancellation is passed on to it, and it is waited for all the same."""
    cancelled: asyncio.CancelledError | None = None
    while not ended.done():
        try:
            await asyncio.shield(ended)
        except asyncio.CancelledError as error:
            cancelled = error
            # Not from here: cancelling may step the coroutines of this very task (see `ServerCalls`), which is being stepped now.
            asyncio.get_running_loop().call_soon(cancel.cancel)
    result = ended.result()
    if cancelled is not None and isinstance(result, outcome.Value):
        raise cancelled
    return result.unwrap()
