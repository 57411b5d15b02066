"""gRPC's message framing: one flag byte, four bytes of length, the message."""

from grpclib.const import Status

PREFIX = 5
"""Bytes before each message."""

_View = bytes | memoryview


class BadMessage(Exception):
    """The reply's bytes are no message that we take; `status` is what the call ends with."""

    def __init__(self, status: Status, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


def frame_message(message: bytes) -> bytes:
    """A message as it goes over the wire, uncompressed."""
    return b"\0" + len(message).to_bytes(4, "big") + message


class MessageReader:
    """Cuts the DATA of one stream into messages, however it was split on its way.

    A message that arrives in many pieces is put together once, at its end.
    """

    __slots__ = ("_limit", "_missing", "_parts", "_prefix")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._prefix = b""
        self._missing = 0
        self._parts: list[_View] = []

    def feed(self, data: _View) -> list[bytes]:
        """The messages that these bytes complete, in order.

        Raises: `BadMessage` for a compressed or oversized message; the reader is of no use after that.
        """
        messages: list[bytes] = []
        at = 0
        if self._missing:
            at = self._missing
            if len(data) < at:
                self._parts.append(data)
                self._missing -= len(data)
                return messages
            self._parts.append(data[:at])
            messages.append(b"".join(self._parts))
            self._parts = []
            self._missing = 0
        elif self._prefix:
            data = self._prefix + data
            self._prefix = b""
        size = len(data)
        while size - at >= PREFIX:
            length = int.from_bytes(data[at + 1 : at + PREFIX], "big")
            if data[at] or length > self._limit:
                raise self._refuse(data[at], length)
            at += PREFIX
            end = at + length
            if end > size:
                self._missing = end - size
                if at < size:
                    self._parts = [data[at:]]
                return messages
            messages.append(bytes(data[at:end]))
            at = end
        if at < size:
            self._prefix = bytes(data[at:])
        return messages

    @property
    def inside(self) -> str | None:
        """Where the reader stands when that is not between two messages: what a truncated reply lacks."""
        if self._missing:
            return f"{self._missing} bytes of a message are missing"
        if self._prefix:
            return f"{len(self._prefix)} of the {PREFIX} bytes before a message arrived"
        return None

    def _refuse(self, flag: int, length: int) -> BadMessage:
        if flag == 1:
            return BadMessage(Status.INTERNAL, "the reply is compressed, which was not asked for")
        if flag:
            return BadMessage(Status.INTERNAL, f"the reply is not gRPC: a message begins with byte {flag}, not 0")
        return BadMessage(
            Status.RESOURCE_EXHAUSTED,
            f"a message of {length} bytes in the reply is over the limit of {self._limit} (max_message_bytes)",
        )
