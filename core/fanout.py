"""`n` outputs of one call: as many requests to one worker, at the same time. No worker's gRPC offers more than one."""

from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import trio

from core.call import Call
from core.errors import CallError
from core.reply import Output
from core.wire.lane import Lane, OutputStream


async def gather(call: Call, lane: Lane, requests: Sequence[Any]) -> list[Output]:
    """The whole answer to each request, in their order. The first failure cancels the others.

    Cancellation: every request is cancelled on the worker.
    Raises: `CallError`.
    """
    if len(requests) == 1:
        return [await lane.generate(call, requests[0], 0)]
    outputs: list[Output | None] = [None] * len(requests)

    async def fetch(index: int) -> None:
        outputs[index] = await lane.generate(call, requests[index], index)

    with _first_error():
        async with trio.open_nursery() as nursery:
            for index in range(len(requests)):
                nursery.start_soon(fetch, index)
    return [output for output in outputs if output]


@asynccontextmanager
async def merge(call: Call, lane: Lane, requests: Sequence[Any]) -> AsyncGenerator[OutputStream, None]:
    """The answers to all requests as one stream, in the order of their arrival.

    Cancellation, and leaving early: every request is cancelled on the worker.
    Raises: `CallError`.
    """
    if len(requests) == 1:
        async with lane.stream(call, requests[0], 0) as single:
            yield single
        return
    with _first_error():
        async with trio.open_nursery() as nursery:
            merged = _Merged(len(requests))
            for index, request in enumerate(requests):
                nursery.start_soon(merged.feed, call, lane, request, index)
            yield merged
            nursery.cancel_scope.cancel()


class _Merged:
    """`core.wire.lane.OutputStream` over several streams."""

    def __init__(self, count: int) -> None:
        self._sources: list[OutputStream] = []
        self._open = count
        # A slow reader holds the workers back by flow control, not by memory here.
        self._send, self._receive = trio.open_memory_channel[list[Output] | CallError](0)

    async def feed(self, call: Call, lane: Lane, request: Any, index: int) -> None:
        try:
            async with lane.stream(call, request, index) as source:
                self._sources.append(source)
                while outputs := await source.receive():
                    await self._send.send(outputs)
        except CallError as error:
            # Handed over, not raised: it must not cancel the reader in the middle of a write.
            await self._send.send(error)
        else:
            await self._send.send([])

    async def receive(self) -> list[Output]:
        while self._open:
            message = await self._receive.receive()
            if isinstance(message, CallError):
                raise message
            if message:
                return message
            self._open -= 1
        return []

    def release(self) -> None:
        for source in self._sources:
            source.release()


@contextmanager
def _first_error() -> Generator[None, None, None]:
    """Let a nursery's `CallError` out by itself: the path decides by its type."""
    try:
        yield
    except BaseExceptionGroup as group:
        errors, rest = group.split(CallError)
        if errors is None or (rest is not None and rest.split(trio.Cancelled)[1] is not None):
            raise
        raise _leaf(errors) from None


def _leaf(error: CallError | ExceptionGroup[CallError]) -> CallError:
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
