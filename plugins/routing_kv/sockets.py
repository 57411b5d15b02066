"""A ZeroMQ socket that trio can wait for, without a thread.

ZeroMQ has one descriptor a socket, which becomes readable when something has happened, not as long as something is there. So one reads
until nothing is left before one waits; and reading is what makes the descriptor unreadable again.
"""

from collections.abc import Sequence
from typing import Self

import trio
import zmq


class Socket:
    """A socket of `kind`, open as long as the context."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", kind: int) -> None:
        self.raw = context.socket(kind)
        self.raw.setsockopt(zmq.LINGER, 0)
        self.raw.setsockopt(zmq.IPV6, 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.raw.close()

    def send(self, frames: Sequence[bytes]) -> None:
        """Queue a message. Raises: `zmq.Again` when the queue is full."""
        self.raw.send_multipart(frames, zmq.NOBLOCK)

    def receive_nowait(self) -> list[bytes] | None:
        """The next message, if it is there."""
        try:
            return self.raw.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    async def receive(self) -> list[bytes]:
        """The next message. Cancellation: none is lost."""
        while (frames := self.receive_nowait()) is None:
            await trio.lowlevel.wait_readable(self.raw.fileno())
        return frames
