"""Calls that stay on their worker until their first output, even when their client has gone.

Some calls leave something behind elsewhere when they are cancelled too early: a decode call is what frees the KV blocks that its prefill
keeps for it. They are held, for a bounded time, and then cancelled like any other.
"""

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import trio

from core.call import Call
from core.fanout import merge
from core.reply import Output
from core.wire.lane import Lane


class Client(Protocol):
    """Whoever waits for a call: `core.serving.client.Client`, whose loss cancels the call."""

    @property
    def lost(self) -> bool:
        """Whether it waits no longer."""
        ...

    def hold(self, seconds: float) -> None:
        """Until `let_go`, let the call go on for so many seconds when it is lost."""
        ...

    def let_go(self) -> None:
        """End a `hold`, and the call of a client that was lost meanwhile."""
        ...


def holding(seconds: float | None, client: Client | None) -> AbstractContextManager[Callable[[], None]]:
    """The scope of an attempt that goes on for so many seconds when its client is lost, and what ends the holding; `None` doesn't hold.

    Another cancellation, that of a shutdown, comes through.
    """
    return nullcontext(_nothing) if seconds is None or client is None else _holding(seconds, client)


@contextmanager
def _holding(seconds: float, client: Client) -> Generator[Callable[[], None], None, None]:
    # A client that was lost a moment ago has cancelled the call already.
    deadline = trio.current_time() + seconds if client.lost else math.inf
    with trio.CancelScope(shield=client.lost, deadline=deadline) as scope:

        def end() -> None:
            scope.shield, scope.deadline = False, math.inf
            client.let_go()

        client.hold(seconds)
        try:
            yield end
        finally:
            end()


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
