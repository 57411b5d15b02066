"""Trio as a guest on the event loop of an asyncio server.

`hypercorn core.app` starts hypercorn's asyncio worker, and headrace is trio. `on_asyncio` starts one trio run on the server's loop and
turns the trio application into an asyncio one: each HTTP request becomes a trio task, whose `receive` and `send` run the server's
coroutines.

A request crosses between the two for every message, so a crossing must be cheap. A task and a trip through both schedulers for each would
cost more than the message itself, and whenever trio has nothing to run, its guest mode hands the waiting to a thread, which is slower
still. Therefore the server's coroutines are stepped right here, in the trio task, by `_Crossing`: most of them end without suspending
(a message is in the queue, the socket takes the bytes), and then nothing else has happened. Only one that does suspend puts the trio task
to sleep until the future it waits for is done.

This is what an asyncio task does with its coroutine, so it is sound under the rules of a task, and these are kept: a step runs from a
callback of the loop and never inside another task's step; it runs in one context of its own; `asyncio.current_task()` is the task that
the server gave the request (`asyncio._enter_task` is the documented way to step a coroutine by hand, see "Extending" in asyncio's
reference); a cancellation first cancels the future that is waited for. One thing differs: a `Task.cancel()` on that task from within the
server's own `send` (`asyncio.timeout` does so) cancels the whole request.
"""

import asyncio
import contextvars
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Protocol, TypeVar, cast

import outcome
import sniffio
import trio

from core.serving.asgi import ASGIApp, Message, Open, Receive, Scope, Send

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
            opened.set_result((app, calls))
            await closing.wait()
            calls.cancel_scope.cancel()

    async with asyncio.TaskGroup() as group:
        group.create_task(_guest_run(hold), name="headrace")
        app, calls = await opened

        async def asgi(scope: Scope, receive: Receive, send: Send) -> None:
            ended: asyncio.Future[outcome.Outcome[None]] = loop.create_future()
            cancel = trio.CancelScope()
            server = _Server(receive, send)
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
            # Not from here: cancelling may step this very task's coroutines, and this task is being stepped now.
            asyncio.get_running_loop().call_soon(cancel.cancel)
    result = ended.result()
    if cancelled is not None and isinstance(result, outcome.Value):
        raise cancelled
    return result.unwrap()


class _Blocker(Protocol):
    """An asyncio future as a coroutine yields it to whoever steps it."""

    _asyncio_future_blocking: bool

    def add_done_callback(self, fn: Callable[..., object], /, *, context: contextvars.Context) -> None: ...
    def remove_done_callback(self, fn: Callable[..., object], /) -> int: ...
    def cancel(self) -> bool: ...
    def done(self) -> bool: ...


_Steps = Generator[_Blocker | None, None, Any]


class _Server:
    """The server's `receive` and `send` of one request, for its trio task."""

    __slots__ = ("_receive", "_send", "context", "loop", "task")

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self.loop = asyncio.get_running_loop()
        self.task = cast("asyncio.Task[Any]", asyncio.current_task())
        self.context = contextvars.copy_context()

    async def receive(self) -> Message:
        return await self._cross(self._receive)

    async def send(self, message: Message) -> None:
        await self._cross(self._send, message)

    async def _cross(self, function: Callable[..., Awaitable[Any]], *args: object) -> Any:
        await trio.lowlevel.checkpoint_if_cancelled()
        steps = cast("_Steps", function(*args).__await__())
        try:
            blocker = self.context.run(self.step, steps.send, None)
        except StopIteration as end:
            return end.value
        except asyncio.CancelledError as error:
            raise _cancelled_by_server() from error
        return await trio.lowlevel.wait_task_rescheduled(_Crossing(self, steps, blocker).abort)

    def step(self, advance: Callable[[Any], _Blocker | None], value: object) -> _Blocker | None:
        """Run a coroutine of the server up to where it suspends, as if its own task did. Raises `StopIteration` at its end."""
        library, sniffio.thread_local.name = sniffio.thread_local.name, "asyncio"
        asyncio._enter_task(self.loop, self.task)
        try:
            return advance(value)
        finally:
            asyncio._leave_task(self.loop, self.task)
            sniffio.thread_local.name = library


class _Crossing:
    """A coroutine of the server that has suspended, and the trio task that sleeps until it ends."""

    __slots__ = ("_blocker", "_raise_cancel", "_server", "_sleeper", "_steps", "_thrown")

    def __init__(self, server: _Server, steps: _Steps, blocker: _Blocker | None) -> None:
        self._server = server
        self._steps = steps
        self._sleeper = trio.lowlevel.current_task()
        self._raise_cancel: Callable[[], object] | None = None
        self._thrown = False
        self._wait_for(blocker)

    def _wait_for(self, blocker: _Blocker | None) -> None:
        self._blocker = blocker
        if blocker is None:
            self._server.loop.call_soon(self._resume, None, context=self._server.context)
        else:
            blocker._asyncio_future_blocking = False  # pyright: ignore[reportPrivateUsage] - what every stepper of coroutines does
            blocker.add_done_callback(self._resume, context=self._server.context)

    def _resume(self, _future: object) -> None:
        if self._raise_cancel is not None and not self._thrown:
            self._thrown = True
            step = outcome.capture(self._server.step, self._steps.throw, asyncio.CancelledError())
        else:
            step = outcome.capture(self._server.step, self._steps.send, None)
        if isinstance(step, outcome.Value):
            self._wait_for(step.value)
        else:
            trio.lowlevel.reschedule(self._sleeper, self._result(step))

    def _result(self, step: outcome.Error) -> outcome.Outcome[Any]:
        if isinstance(step.error, StopIteration):
            return outcome.Value(step.error.value)
        if not isinstance(step.error, asyncio.CancelledError):
            return step
        if self._raise_cancel is not None:
            return outcome.capture(self._raise_cancel)
        return outcome.Error(_cancelled_by_server())

    def abort(self, raise_cancel: Callable[[], object]) -> trio.lowlevel.Abort:
        """Cancel the server's coroutine; the trio task goes on when that has ended, which mostly is at once."""
        self._raise_cancel = raise_cancel
        blocker = self._blocker
        if blocker is not None and not blocker.done():
            # Cancelling a future schedules its callbacks, so ours is taken off first. A plain future is done then, and the coroutine goes
            # on right here; a task is not.
            blocker.remove_done_callback(self._resume)
            blocker.cancel()
            if blocker.done():
                self._server.context.run(self._resume, None)
            else:
                blocker.add_done_callback(self._resume, context=self._server.context)
        return trio.lowlevel.Abort.FAILED


def _cancelled_by_server() -> trio.BrokenResourceError:
    """On trio an asyncio cancellation means nothing, and as no `Exception` it would end more than this request."""
    return trio.BrokenResourceError("the server cancelled its own receive or send")
