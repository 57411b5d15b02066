"""The protocol core: gRPC over HTTP/2, client side, without I/O.

Bytes from the worker go into `receive`, which returns events; bytes for the worker come out of `take_output`. Streams
and HPACK are h2's; DATA, GOAWAY and what the peer may send us (inbound flow control) are handled here, for the reasons
that `frames` gives. Nothing here waits, and nothing depends on how the bytes were split.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from grpclib.const import Status
from h2.errors import ErrorCodes
from h2.events import (
    PingAckReceived,
    RemoteSettingsChanged,
    ResponseReceived,
    SettingsAcknowledged,
    StreamReset,
    TrailersReceived,
    WindowUpdated,
)
from h2.exceptions import NoSuchStreamError, ProtocolError
from h2.settings import SettingCodes

from core.wire.grpc.events import (
    Broken,
    Ended,
    Event,
    GoingAway,
    HeadReceived,
    MessageReceived,
    PingAnswered,
    SendWindowOpened,
    SettingsReceived,
)
from core.wire.grpc.frames import Data, FrameCutter, FrameError, GoAway
from core.wire.grpc.headers import HeaderList, Verdict, refusal, verdict
from core.wire.grpc.inflow import Inflow, StreamInflow
from core.wire.grpc.limits import ChannelLimits
from core.wire.grpc.messages import PREFIX, BadMessage, MessageReader
from core.wire.grpc.resets import ResetBudget
from core.wire.grpc.setup import MAX_FRAME, new_h2

# https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md#errors
_OF_RESET = {
    ErrorCodes.REFUSED_STREAM: Status.UNAVAILABLE,
    ErrorCodes.CANCEL: Status.CANCELLED,
    ErrorCodes.ENHANCE_YOUR_CALM: Status.RESOURCE_EXHAUSTED,
    ErrorCodes.INADEQUATE_SECURITY: Status.PERMISSION_DENIED,
}


class _Reply:
    """One open stream, as far as its reply has come."""

    __slots__ = ("half_closed", "has_head", "inflow", "reader")

    def __init__(self, limit: int, *, half_closed: bool) -> None:
        self.reader = MessageReader(limit)
        self.has_head = False
        self.half_closed = half_closed  # our side has ended
        self.inflow = StreamInflow()


class ClientProtocol:
    """One connection to a worker. See the module for what it is, `events` for what it says."""

    def __init__(self, limits: ChannelLimits) -> None:
        self._limits = limits
        self._h2 = new_h2(limits)
        #: How many streams the peer takes at a time. Without a word from it: no limit.
        self.max_streams = self._h2.remote_settings.max_concurrent_streams
        self._cutter = FrameCutter(MAX_FRAME)
        self._replies: dict[int, _Reply] = {}
        self._resets = ResetBudget()
        self._inflow = Inflow(limits)
        self._highest = 0
        self._going: GoAway | None = None
        self._settings_known = False  # the peer has acknowledged our first settings
        self._broken = False
        self._handlers: dict[type[Any], Callable[[Any, list[Event]], None]] = {
            ResponseReceived: self._on_head,
            TrailersReceived: self._on_trailers,
            StreamReset: self._on_reset,
            WindowUpdated: self._on_window,
            RemoteSettingsChanged: self._on_settings,
            SettingsAcknowledged: self._on_settings_acknowledged,
            PingAckReceived: self._on_ping,
        }
        self._h2.initiate_connection()
        self._preface = self._h2.data_to_send()  # comes before everything, also before window updates

    # -- what the driver asks --

    @property
    def open_streams(self) -> int:
        """Streams that have not ended."""
        return len(self._replies)

    @property
    def takes_streams(self) -> bool:
        """Whether a stream could be opened, apart from `max_streams`."""
        return self._going is None and not self._broken and not self._resets.strained and not self._used_up

    @property
    def strained(self) -> bool:
        """Whether resets wait for the peer (see `resets`)."""
        return self._resets.strained

    @property
    def going_away(self) -> bool:
        """Whether there will never be another stream here."""
        return self._going is not None or self._broken or self._used_up

    @property
    def _used_up(self) -> bool:
        return self._highest >= 2 * self._limits.calls_per_connection - 1  # a client's streams have odd numbers

    @property
    def highest_stream_id(self) -> int:
        """The last stream opened; its HEADERS are in what `take_output` returned or will return."""
        return self._highest

    # -- what the driver does --

    def take_output(self) -> bytes:
        """All bytes for the peer that have not been taken yet."""
        if not self._broken and self._resets.ask():
            self._h2.update_settings({})
        output = self._h2.data_to_send()
        if updates := self._inflow.take_updates():
            output = updates + output
        if self._preface:
            output, self._preface = self._preface + output, b""
        return output

    def open(self, headers: Sequence[tuple[bytes, bytes]], *, end: bool = False) -> int:
        """Open a stream; only while `takes_streams`, and below `max_streams`. Returns its id."""
        stream_id = self._h2.get_next_available_stream_id()
        self._h2.send_headers(stream_id, headers, end_stream=end)
        self._highest = stream_id
        self._replies[stream_id] = _Reply(self._limits.max_message_bytes, half_closed=end)
        return stream_id

    def send(self, stream_id: int, data: bytes | memoryview, *, end: bool) -> int:
        """Send as much of `data` as both windows allow, and say how much that was.

        `end` goes out with the last byte. On a stream that has ended, everything counts as sent.
        """
        reply = self._replies.get(stream_id)
        if reply is None or reply.half_closed:
            return len(data)
        h2 = self._h2
        size = len(data)
        if not size:
            if end:
                reply.half_closed = True
                h2.end_stream(stream_id)
            return 0
        sent = 0
        while (room := min(h2.local_flow_control_window(stream_id), h2.max_outbound_frame_size)) > 0:
            upto = min(sent + room, size)
            last = upto == size
            h2.send_data(stream_id, data[sent:upto], end_stream=end and last)
            sent = upto
            if last:
                reply.half_closed = end
                break
        return sent

    def took(self, stream_id: int, size: int) -> bool:
        """Messages of `size` bytes, framing included, were taken: the peer may send that much more.

        Whether there is something to tell it now.
        """
        reply = self._replies.get(stream_id)
        if reply is None:
            return False
        return self._inflow.took(stream_id, reply.inflow, size)

    def reset(self, stream_id: int) -> None:
        """Cancel a stream; there is no event for it. Nothing happens when it has ended."""
        if self._replies.pop(stream_id, None) is not None and self._resets.take(stream_id):
            self._cancel(stream_id)

    def ping(self, payload: bytes) -> None:
        """Send a PING with these eight bytes."""
        if not self._broken:
            self._h2.ping(payload)

    def close(self) -> None:
        """Say goodbye (GOAWAY); afterwards the connection has to be closed."""
        self._break(ErrorCodes.NO_ERROR)

    def receive(self, data: bytes) -> list[Event]:
        """What these bytes from the peer mean.

        Never raises for what a peer sent: bytes that break the protocol give `Broken`, as the last event ever.
        """
        events: list[Event] = []
        if self._broken:
            return events
        try:
            pieces = self._cutter.feed(data)
            for piece in pieces:
                if type(piece) is Data:
                    self._on_data(piece, events)
                elif type(piece) is GoAway:
                    self._on_goaway(piece, events)
                else:
                    for event in self._h2.receive_data(piece):  # pyright: ignore[reportArgumentType]
                        handler = self._handlers.get(type(event))
                        if handler is not None:
                            handler(event, events)
        except FrameError as error:
            self._break(ErrorCodes.PROTOCOL_ERROR)
            events.append(Broken(f"the worker broke HTTP/2: {error}"))
        except ProtocolError as error:  # h2 has put a GOAWAY into its output
            self._forget()
            events.append(Broken(f"the worker broke HTTP/2: {error}"))
        return events

    # -- what came --

    def _on_data(self, piece: Data, events: list[Event]) -> None:
        stream_id = piece.stream_id
        self._inflow.arrived(piece.size)
        reply = self._replies.get(stream_id)
        if reply is None:
            if stream_id > self._highest or not stream_id % 2:
                raise FrameError(f"DATA came on stream {stream_id}, which was never opened")
            return  # on its way when the stream was reset
        if not reply.has_head:
            self._fail(stream_id, Status.INTERNAL, "the reply has DATA before its headers", events)
            return
        self._inflow.arrived_on(stream_id, reply.inflow, piece.size)
        try:
            messages = reply.reader.feed(piece.payload)
        except BadMessage as error:
            self._fail(stream_id, error.status, error.message, events)
            return
        for message in messages:
            reply.inflow.untaken += len(message) + PREFIX
            events.append(MessageReceived(stream_id, message))
        if piece.end:
            text = reply.reader.inside
            text = "the reply ended without trailers" if text is None else f"the reply is cut off: {text}"
            self._fail(stream_id, Status.INTERNAL, text, events)
        else:
            self._inflow.credit(stream_id, reply.inflow)

    def _on_head(self, event: ResponseReceived, events: list[Event]) -> None:
        stream_id = event.stream_id or 0
        reply = self._replies.get(stream_id)
        if reply is None:
            return
        self._resets.accepted(stream_id)
        reply.has_head = True
        headers: HeaderList = event.headers or ()
        refused = refusal(headers)
        if event.stream_ended is not None:
            self._end(stream_id, refused or verdict(headers), headers, events)
        elif refused is not None:
            self._fail(stream_id, refused.status, refused.message, events)
        else:
            events.append(HeadReceived(stream_id, headers))

    def _on_trailers(self, event: TrailersReceived, events: list[Event]) -> None:
        stream_id = event.stream_id or 0
        reply = self._replies.get(stream_id)
        if reply is None:
            return
        trailers: HeaderList = event.headers or ()
        ending = verdict(trailers)
        text = reply.reader.inside
        if text is not None and ending.status is Status.OK:
            ending = Verdict(Status.INTERNAL, f"the reply is cut off: {text}")
        self._end(stream_id, ending, trailers, events)

    def _on_reset(self, event: StreamReset, events: list[Event]) -> None:
        stream_id = event.stream_id or 0
        if self._replies.pop(stream_id, None) is None:
            return
        code = event.error_code
        known = isinstance(code, ErrorCodes)
        refused = code is ErrorCodes.REFUSED_STREAM
        if not refused:
            self._resets.accepted(stream_id)
        text = f"the call was reset: {code.name if known else code}"
        status = _OF_RESET.get(code, Status.INTERNAL) if known else Status.INTERNAL
        events.append(Ended(stream_id, status, text, lost=refused, unprocessed=refused))

    def _on_window(self, event: WindowUpdated, events: list[Event]) -> None:
        events.append(SendWindowOpened(event.stream_id or 0))

    def _on_settings(self, event: RemoteSettingsChanged, events: list[Event]) -> None:
        self.max_streams = self._h2.remote_settings.max_concurrent_streams
        events.append(SettingsReceived())
        if SettingCodes.INITIAL_WINDOW_SIZE in event.changed_settings:
            events.append(SendWindowOpened(0))

    def _on_ping(self, event: PingAckReceived, events: list[Event]) -> None:
        events.append(PingAnswered(event.ping_data or b""))

    def _on_settings_acknowledged(self, _event: SettingsAcknowledged, _events: list[Event]) -> None:
        if not self._settings_known:
            self._settings_known = True
            return
        for stream_id in self._resets.answered():
            self._cancel(stream_id)

    def _on_goaway(self, frame: GoAway, events: list[Event]) -> None:
        self._going = frame
        try:
            name = ErrorCodes(frame.code).name
        except ValueError:
            name = str(frame.code)
        debug = f" ({frame.debug[:200].decode('utf-8', 'replace')})" if frame.debug else ""
        reason = f"the worker closes the connection: {name}{debug}"
        events.append(GoingAway(reason))
        for stream_id in [stream_id for stream_id in self._replies if stream_id > frame.last_stream_id]:
            del self._replies[stream_id]
            events.append(Ended(stream_id, Status.UNAVAILABLE, reason, lost=True, unprocessed=True))

    # -- ends --

    def _cancel(self, stream_id: int) -> None:
        # h2 is ahead of the events that it gives: the peer may have reset the stream itself, right behind its end.
        with suppress(NoSuchStreamError):
            self._h2.reset_stream(stream_id, ErrorCodes.CANCEL)

    def _end(self, stream_id: int, ending: Verdict, trailers: HeaderList, events: list[Event]) -> None:
        """The peer has ended the stream; if we had not, there is no point in going on."""
        if not self._replies.pop(stream_id).half_closed:
            self._cancel(stream_id)
        events.append(Ended(stream_id, ending.status, ending.message, ending.details, trailers))

    def _fail(self, stream_id: int, status: Status, message: str | None, events: list[Event]) -> None:
        """End a stream whose reply makes no sense."""
        self.reset(stream_id)
        events.append(Ended(stream_id, status, message))

    def _break(self, code: ErrorCodes) -> None:
        if not self._broken:
            self._forget()
            self._h2.close_connection(code)

    def _forget(self) -> None:
        self._broken = True
        self._replies.clear()
