"""Ends calls by their id where their workers can't: at the gate, where none has them yet, and where they know them by other ids."""

from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import trio

from core.call import Call, id_of_output
from core.errors import CallAborted
from core.reply import ChunkChoice, Output

T = TypeVar("T")


class Aborts:
    """The calls that wait, and those that went to a worker as several requests (`n`), by the id that the client knows."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[tuple[Call, trio.CancelScope]]] = {}
        self._several: dict[str, list[int]] = {}

    @contextmanager
    def waiting(self, call: Call) -> Generator[None, None, None]:
        """The scope in which a call waits that no worker has. Raises: `CallAborted`."""
        with trio.CancelScope() as scope, _among(self._waiting, call.id, (call, scope)):
            yield
        if scope.cancelled_caught:
            raise CallAborted

    @contextmanager
    def several(self, call: Call, count: int) -> Generator[None, None, None]:
        """The scope in which a worker has a call as so many requests."""
        with _among(self._several, call.id, count):
            yield

    def end_waiting(self, ids: Collection[str]) -> None:
        """End the calls that wait."""
        for id_ in ids:
            for _, scope in self._waiting.get(id_, ()):
                scope.cancel()

    def end_all_waiting(self, models: Collection[str] | None) -> None:
        """End all calls that wait, or those for one of these models."""
        for call, scope in [one for some in self._waiting.values() for one in some]:
            if models is None or call.model in models:
                scope.cancel()

    def known_as(self, ids: Sequence[str]) -> list[str]:
        """The ids, and the others by which workers know these calls."""
        return [*ids, *(id_of_output(id_, index) for id_ in ids for index in range(max(self._several.get(id_, (0,)))))]


@contextmanager
def _among(known: dict[str, list[T]], key: str, value: T) -> Generator[None, None, None]:
    values = known.setdefault(key, [])
    values.append(value)
    try:
        yield
    finally:
        values.remove(value)
        if not values:
            del known[key]


class AbortedStream:
    """`core.wire.lane.OutputStream` of a call that ended at the gate: what a worker says of one that it has not begun."""

    def __init__(self, call: Call) -> None:
        self._outputs = aborted(call)

    async def receive(self) -> list[Output]:
        """See `OutputStream`."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def release(self) -> None:
        """See `OutputStream`."""


def aborted(call: Call) -> list[Output]:
    """The outputs of a call that ended at the gate."""
    return [
        Output(
            choice=ChunkChoice(index=index, token_ids=[], finish_reason="abort"),
            prompt_tokens=len(call.token_ids),
            cached_tokens=0,
            completion_tokens=0,
            prompt_token_ids=call.token_ids if call.return_token_ids and not index else None,
        )
        for index in range(call.sampling.n or 1)
    ]
