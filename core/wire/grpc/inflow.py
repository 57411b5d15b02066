"""Inbound flow control: how much a worker may send, and when it may send more.

A connection gets its credit back as data arrives, so that a stream that nobody reads stalls only itself. A stream gets it
back as messages are taken; the pieces of a message still under way count as taken, since nobody could take them, and a
message may be larger than the window. Both in steps of a quarter of the window, not to answer each token with a frame.

What was on its way to a stream when it was reset counts for the connection like everything else.
"""

from hyperframe.frame import WindowUpdateFrame

from core.wire.grpc.frames import FrameError
from core.wire.grpc.limits import ChannelLimits

_INITIAL_CONNECTION_WINDOW = 65_535  # RFC 9113 §6.9.2; settings can't change it


class StreamInflow:
    """One stream's account, in flow-controlled bytes."""

    __slots__ = ("credited", "received", "untaken")

    def __init__(self) -> None:
        self.received = 0
        self.credited = 0  # of these, given back to the worker
        self.untaken = 0  # in messages that nobody took yet, framing included


class Inflow:
    """A connection's account, and the WINDOW_UPDATE frames that come of it."""

    def __init__(self, limits: ChannelLimits) -> None:
        self._stream_window = limits.stream_window
        self._window = limits.connection_window
        self._received = 0  # and not given back
        self._updates: list[bytes] = []
        self._update(0, limits.connection_window - _INITIAL_CONNECTION_WINDOW)

    def take_updates(self) -> bytes:
        """The frames to send, whole ones."""
        updates = b"".join(self._updates)
        self._updates.clear()
        return updates

    def arrived(self, size: int) -> None:
        """DATA came on any stream. Raises: `FrameError` when the worker wasn't allowed to send it."""
        self._received += size
        if self._received * 4 >= self._window:
            if self._received > self._window:
                raise FrameError("more DATA came than the connection's window allows")
            self._update(0, self._received)
            self._received = 0

    def arrived_on(self, stream_id: int, stream: StreamInflow, size: int) -> None:
        """DATA came on an open stream. Raises: `FrameError` as `arrived`."""
        stream.received += size
        if stream.received - stream.credited > self._stream_window:
            raise FrameError(f"more DATA came on stream {stream_id} than its window allows")

    def took(self, stream_id: int, stream: StreamInflow, size: int) -> bool:
        """Messages of `size` bytes were taken; whether there is something to send now."""
        stream.untaken -= size
        return self.credit(stream_id, stream)

    def credit(self, stream_id: int, stream: StreamInflow) -> bool:
        """Give back what is due, if it's enough; whether there is something to send now."""
        due = stream.received - stream.untaken - stream.credited
        if due * 4 < self._stream_window:
            return False
        stream.credited += due
        self._update(stream_id, due)
        return True

    def _update(self, stream_id: int, size: int) -> None:
        if size:
            self._updates.append(WindowUpdateFrame(stream_id, window_increment=size).serialize())
