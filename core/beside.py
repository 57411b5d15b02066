"""A task that runs beside a block of code."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

import trio


@asynccontextmanager
async def beside(task: Callable[[], Awaitable[None]]) -> AsyncGenerator[trio.CancelScope, None]:
    """Run `task` for as long as the body of the `async with` runs; gives the scope of both.

    The task is cancelled when the body ends. An exception of the body comes out as it is, in no group, so that callers can go by its
    type; one of the task cancels the body and comes out in a group.

    Cancellation: both end.
    """
    failure: Exception | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(task)
        try:
            yield nursery.cancel_scope
        except Exception as error:  # noqa: BLE001 - raised again below, outside of the nursery that would wrap it
            failure = error
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
