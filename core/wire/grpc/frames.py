"""Cuts an HTTP/2 connection's bytes into what h2 shall see and the two kinds of frames that it shall not.

* GOAWAY: h2 refuses every frame after it. RFC 9113 §6.8 lets the streams up to its last id go on, and gRPC servers use
  that to shut down.
* DATA: h2 needs 13 µs for a small frame, and hex-dumps large ones for a log line that nobody reads. A token is one DATA
  frame; taking it out ourselves costs 2 µs.

Everything else passes untouched and in order.
"""

from msgspec import Struct

_HEADER = 9
_DATA = 0x0
_GOAWAY = 0x7
_END_STREAM = 0x1
_PADDED = 0x8
_LARGE = 16 * 1024
_GOAWAY_MAX = 64 * 1024


class Data(Struct, frozen=True, gc=False):
    """A piece of a DATA frame. `size` is what it counts for in flow control; `end`: it is the stream's last."""

    stream_id: int
    payload: bytes | memoryview
    size: int
    end: bool


class GoAway(Struct, frozen=True):
    """The peer takes no new streams, and has not looked at those above `last_stream_id`."""

    last_stream_id: int
    code: int
    debug: bytes


class FrameError(Exception):
    """The bytes are not HTTP/2, or break its rules; `args[0]` says how."""


class FrameCutter:
    """Feed it bytes as they come; pieces come out in order. `bytes` are for h2."""

    def __init__(self, max_frame: int) -> None:
        self._max_frame = max_frame
        self._held: bytes = b""  # the start of a frame whose header, or whose whole, has to be seen first
        self._left = 0  # bytes of the current frame still to come
        self._stream_id = -1  # that frame's stream when it is DATA, -1 when it is h2's
        self._end = False

    def feed(self, data: bytes) -> list[bytes | Data | GoAway]:
        """The pieces that these bytes make.

        Raises: `FrameError`; the cutter is of no use after that.
        """
        if self._held:
            data = self._held + data
            self._held = b""
        pieces: list[bytes | Data | GoAway] = []
        size = len(data)
        at = passed = 0  # data[passed:at] is for h2, not handed out yet
        if self._left:
            at = min(self._left, size)
            self._left -= at
            if self._stream_id >= 0:
                pieces.append(self._piece(data, 0, at, self._left))
                passed = at
        while size - at >= _HEADER:
            length = int.from_bytes(data[at : at + 3], "big")
            kind = data[at + 3]
            if length > self._max_frame:
                raise FrameError(f"a frame of {length} bytes came, the limit is {self._max_frame}")
            if kind not in (_DATA, _GOAWAY):
                at += _HEADER + length
                if at > size:
                    self._left = at - size
                    self._stream_id = -1
                    at = size
                continue
            if passed < at:
                pieces.append(data[passed:at])
            whole = at + _HEADER + length
            flags = data[at + 4]
            if kind == _GOAWAY or flags & _PADDED:
                if kind == _GOAWAY and not 8 <= length <= _GOAWAY_MAX:
                    raise FrameError(f"a GOAWAY frame has {length} bytes")
                if whole > size:
                    self._held = data[at:]
                    return pieces
                body = data[at + _HEADER : whole]
                pieces.append(_goaway(body) if kind == _GOAWAY else _unpadded(_stream_id(data, at), flags, body))
                at = passed = whole
                continue
            self._stream_id = _stream_id(data, at)
            self._end = bool(flags & _END_STREAM)
            start = at + _HEADER
            at = passed = min(whole, size)
            self._left = whole - at
            pieces.append(self._piece(data, start, at, self._left))
        if passed < at:
            pieces.append(data[passed:at])
        if at < size:
            self._held = data[at:]
        return pieces

    def _piece(self, data: bytes, start: int, stop: int, left: int) -> Data:
        size = stop - start
        payload = memoryview(data)[start:stop] if size > _LARGE else data[start:stop]
        return Data(self._stream_id, payload, size, self._end and not left)


def _stream_id(data: bytes, at: int) -> int:
    return int.from_bytes(data[at + 5 : at + _HEADER], "big") & 0x7FFF_FFFF


def _unpadded(stream_id: int, flags: int, body: bytes) -> Data:
    if not body or body[0] >= len(body):
        raise FrameError("a DATA frame is padded beyond its end")
    return Data(stream_id, body[1 : len(body) - body[0]], len(body), bool(flags & _END_STREAM))


def _goaway(body: bytes) -> GoAway:
    last = int.from_bytes(body[:4], "big") & 0x7FFF_FFFF
    return GoAway(last, int.from_bytes(body[4:8], "big"), body[8:])
