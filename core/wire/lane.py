"""A lane: one way in which one call can go to one worker."""

from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from core.call import Call
from core.reply import Output
from core.wire.needs import Wire


class OutputStream(Protocol):
    """The messages of a streamed call."""

    async def receive(self) -> list[Output]:
        """Everything that has arrived, at least one message; an empty list is the end.

        Cancellation: nothing is lost; the stream is released when its context is left.
        Raises: `CallError`.
        """
        ...

    def release(self) -> None:
        """Reset the call on the worker at once; may be called from any task, and more than once."""
        ...


class Lane(Protocol):
    """What both wires offer.

    A call is cancelled on the worker when the task that awaits it is cancelled, or when the stream's context is left early.
    """

    @property
    def wire(self) -> Wire:
        """Which wire this is."""
        ...

    @property
    def can(self) -> frozenset[str]:
        """The needs that it serves, see `core.wire.needs`."""
        ...

    def at_rank(self, rank: int) -> "Lane":
        """The same lane to one data-parallel rank of the worker; without it, the worker chooses."""
        ...

    def lower(self, call: Call, index: int) -> Any:
        """The wire's request for output number `index` of the call; its salt is the namespace of the call's identity."""
        ...

    async def generate(self, call: Call, request: Any, index: int) -> Output:
        """The whole answer in one message. Raises: `CallError`; `WorkerLost` when another worker may do better."""
        ...

    def stream(self, call: Call, request: Any, index: int) -> AbstractAsyncContextManager[OutputStream]:
        """The answer as it comes. Raises as `generate` does, on entry or from `receive`."""
        ...
