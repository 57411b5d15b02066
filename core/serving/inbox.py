"""What `headrace serve` has for the handler of one request: ASGI's `receive`, and more than that."""

from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

import trio

from core.serving.asgi import Message

#: Messages of a request's body that wait for its handler, of one read each; then reading stops.
_ROOM: Final = 10


class Inbox:
    """The messages for a handler; calling it is ASGI's `receive`.

    `want`, called once, tells the server that the handler waits for the body: a client may wait to be asked for it (`100-continue`). With
    one, the server also takes an answer before the end of the body (`early`).
    """

    __slots__ = ("_closed", "_messages", "_on_disconnect", "_room", "_waiting", "_want", "early")

    def __init__(self, want: Callable[[], Awaitable[None]] | None = None) -> None:
        self.early = want is not None
        self._want = want
        self._messages: deque[Message] = deque()
        self._waiting = trio.lowlevel.ParkingLot()
        self._room = trio.lowlevel.ParkingLot()
        self._on_disconnect: Callable[[], object] | None = None
        self._closed = False

    async def __call__(self) -> Message:
        """The next message. Cancellation: loses none."""
        await trio.lowlevel.checkpoint_if_cancelled()
        while not self._messages:
            if self._want is not None:
                want, self._want = self._want, None
                await want()
            else:
                await self._waiting.park()
        self._room.unpark()
        return self._messages.popleft()

    def on_disconnect(self, tell: Callable[[], object]) -> None:
        """Call `tell`, which neither blocks nor raises, in place of the message that the client has gone or the reply is complete.

        A handler that would wait for that message in a task of its own needs none. For after the body was read.
        """
        self._on_disconnect = tell
        if self._messages:
            tell()

    async def put(self, message: Message) -> None:
        """Add a message; waits while there are too many. That the client has gone is said at once."""
        if message["type"] == "http.disconnect" and self._on_disconnect is not None:
            self._on_disconnect()
            return
        self._messages.append(message)
        self._waiting.unpark()
        if message["type"] == "http.disconnect":
            self._room.unpark_all()
            return
        while len(self._messages) > _ROOM and not self._closed:
            await self._room.park()

    def close(self) -> None:
        """Nobody will read: let go of whoever waits for room."""
        self._closed = True
        self._room.unpark_all()
