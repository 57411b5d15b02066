"""Calls that stay on their worker until their first output, even when their client has gone.

Some calls leave something behind elsewhere when they are cancelled too early: a decode call is what frees the KV blocks that its prefill
keeps for it. They are held, for a bounded time, and then cancelled like any other.
"""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any

import trio

from core.beside import beside
from core.call import Call
from core.fanout import merge
from core.reply import Output
from core.wire.lane import Lane


def holding(seconds: float | None) -> AbstractAsyncContextManager[Callable[[], None]]:
    """The scope of an attempt that is held for so many seconds after its cancellation, and what ends the holding; `None` doesn't hold."""
    return nullcontext(_nothing) if seconds is None else _holding(seconds)


@asynccontextmanager
async def _holding(seconds: float) -> AsyncGenerator[Callable[[], None], None]:
    scope = trio.CancelScope(shield=True)

    async def bound() -> None:
        try:
            await trio.sleep_forever()
        finally:  # the cancellation that the body doesn't see
            if scope.shield:
                scope.deadline = trio.current_time() + seconds

    def end() -> None:
        scope.shield = False

    async with beside(bound):
        with scope:
            yield end


async def collect(call: Call, lane: Lane, requests: Sequence[Any], began: Callable[[], None]) -> list[Output]:
    """The whole answer to each request, in their order, as `core.fanout.gather` gives it, out of streams; `began` is called when there are
    outputs.

    Cancellation: every request is cancelled on the worker.
    Raises: `CallError`.
    """
    whole: dict[int, Output] = {}
    async with merge(call, lane, requests) as source:
        while outputs := await source.receive():
            began()
            for output in outputs:
                known = whole.setdefault(output.choice.index, output)
                if known is not output:
                    _append(known, output)
    return [whole[index] for index in sorted(whole)]


def _append(whole: Output, output: Output) -> None:
    """Add a later message of a stream to the earlier ones."""
    choice, part = whole.choice, output.choice
    choice.token_ids += part.token_ids
    if choice.logprobs and part.logprobs:
        choice.logprobs.content += part.logprobs.content
    if part.sampling_mask:
        choice.sampling_mask = [*(choice.sampling_mask or ()), *part.sampling_mask]
    for name in ("logprobs", "finish_reason", "stop_reason", "routed_experts", "weight_versions"):
        if name != "logprobs" or choice.logprobs is None:
            _take(choice, part, name)
    for name in Output.__struct_fields__[1:]:
        _take(whole, output, name)


def _take(whole: Any, part: Any, name: str) -> None:
    if (value := getattr(part, name)) is not None:
        setattr(whole, name, value)


def _nothing() -> None:
    pass
