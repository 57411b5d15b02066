"""How a trio task calls an asyncio server: `receive` and `send` across two schedulers.

A request crosses for every message, so a crossing must be cheap. A task and a trip through both schedulers for each would cost more than
the message itself, and whenever trio has nothing to run, its guest mode hands the waiting to a thread, which is slower still (110 µs
against 1.5). Therefore the server's coroutines are stepped right here, in the trio task: most of them end without suspending (a message
is in the queue, the socket takes the bytes), and then nothing else has happened. Only one that does suspend puts the trio task to sleep
until the future it waits for is done.

This is what an asyncio task does with its coroutine, so it is sound under the rules of a task, and these are kept: a step runs from a
callback of the loop and never inside another task's step; it runs in one context of its own; `asyncio.current_task()` is the task that
the server gave the request (`asyncio._enter_task` is the documented way to step a coroutine by hand, see "Extending" in asyncio's
reference); a cancellation first cancels the future that is waited for. One thing differs: a `Task.cancel()` on that task from within the
server's own `send` (`asyncio.timeout` does so) cancels the whole request.
"""

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Generator
from typing import Any, Protocol, cast

import outcome
import sniffio
import trio

from core.serving.asgi import Message, Receive, Send


class _Blocker(Protocol):
    """An asyncio future as a coroutine yields it to whoever steps it."""

    _asyncio_future_blocking: bool

    def add_done_callback(self, fn: Callable[..., object], /, *, context: contextvars.Context) -> None: ...
    def cancel(self) -> bool: ...
    def cancelled(self) -> bool: ...
    def done(self) -> bool: ...


_Steps = Generator[_Blocker | None, None, Any]


class ServerCalls:
    """The server's `receive` and `send` of one request, for its trio task. Made in the task that the server gave the request.

    Cancelling either of them cancels the server's coroutine and waits for its end; a result that has come by then is delivered. What the
    coroutine raises comes out; a cancellation that the server made itself comes out as `trio.BrokenResourceError`.
    """

    __slots__ = ("_receive", "_send", "context", "loop", "task")

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self.loop = asyncio.get_running_loop()
        self.task = cast("asyncio.Task[Any]", asyncio.current_task())
        self.context = contextvars.copy_context()

    async def receive(self) -> Message:
        """ASGI's `receive`, on trio."""
        return await self._cross(self._receive)

    async def send(self, message: Message) -> None:
        """ASGI's `send`, on trio."""
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

    def turn(self) -> _Blocker:
        """A future that is done at the next turn of the loop."""
        future: asyncio.Future[None] = self.loop.create_future()
        self.loop.call_soon(_finish, future)
        return cast("_Blocker", future)


def _finish(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


class _Crossing:
    """A coroutine of the server that has suspended, and the trio task that sleeps until it ends."""

    __slots__ = ("_blocker", "_cancelled", "_raise_cancel", "_server", "_sleeper", "_steps")

    def __init__(self, server: ServerCalls, steps: _Steps, blocker: _Blocker | None) -> None:
        self._server = server
        self._steps = steps
        self._sleeper = trio.lowlevel.current_task()
        self._raise_cancel: Callable[[], object] | None = None
        self._cancelled = False
        self._wait_for(blocker)

    def _wait_for(self, blocker: _Blocker | None) -> None:
        # A bare yield (`asyncio.sleep(0)`) asks for one turn of the loop.
        self._blocker = blocker = blocker or self._server.turn()
        blocker._asyncio_future_blocking = False  # pyright: ignore[reportPrivateUsage] - what every stepper of coroutines does
        blocker.add_done_callback(self._resume, context=self._server.context)
        if self._raise_cancel is not None and not self._cancelled:
            self._cancel(blocker)

    def _resume(self, blocker: _Blocker) -> None:
        if blocker is not self._blocker:
            return  # the callback of a future that `abort` did not wait for
        self._blocker = None
        if blocker.cancelled():
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
        """Cancel the server's coroutine. The trio task goes on when it has ended, as a rule right here; a result that has come is kept."""
        self._raise_cancel = raise_cancel
        if self._blocker is not None:
            self._server.context.run(self._cancel, self._blocker)
        return trio.lowlevel.Abort.FAILED

    def _cancel(self, blocker: _Blocker) -> None:
        if not blocker.done():
            self._cancelled = True
            blocker.cancel()
        # Without waiting for its callback: trio may have nothing else to do, and would go to sleep in its thread for one turn of the loop.
        # A task, unlike a plain future, is not done yet.
        if blocker.done():
            self._resume(blocker)


def _cancelled_by_server() -> trio.BrokenResourceError:
    """On trio an asyncio cancellation means nothing, and as no `Exception` it would end more than this request."""
    return trio.BrokenResourceError("the server cancelled its own receive or send")
