"""The names of ASGI 3, as far as headrace speaks it."""

from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, runtime_checkable

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]


@runtime_checkable
class Ending(Protocol):
    """An application that wants to know of its end before its requests are cancelled; what `Open` gives may be one."""

    def stop(self) -> None:
        """The first signal: requests in flight may finish, and what needs more time than they should ends."""
        ...

    async def end(self) -> None:
        """Requests are going to be cancelled: answer those that can be. Has a deadline of its own."""
        ...


#: Opens the proxy, on trio: entering it starts everything, leaving it ends everything.
Open = Callable[[], AbstractAsyncContextManager[ASGIApp]]
