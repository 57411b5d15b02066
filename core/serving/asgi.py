"""The names of ASGI 3, as far as headrace speaks it."""

from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import AbstractAsyncContextManager
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

#: Opens the proxy, on trio: entering it starts everything, leaving it ends everything.
Open = Callable[[], AbstractAsyncContextManager[ASGIApp]]
