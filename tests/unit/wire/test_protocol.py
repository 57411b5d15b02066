"""The protocol core without I/O, against h2's server side."""

import pytest
from grpclib.const import Status
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import DataReceived, RemoteSettingsChanged, RequestReceived, StreamReset
from hyperframe.frame import DataFrame, GoAwayFrame, WindowUpdateFrame
from hypothesis import example, given
from hypothesis import strategies as st

from core.wire.grpc.events import Broken, Ended, Event, GoingAway, HeadReceived, MessageReceived
from core.wire.grpc.headers import request_headers
from core.wire.grpc.limits import ChannelLimits
from core.wire.grpc.messages import frame_message
from core.wire.grpc.protocol import ClientProtocol
from core.wire.grpc.resets import BURST
from tests.unit.wire.peer import HEAD, OK, new_server
from tests.unit.wire.splits import cut

REQUEST = request_headers("/test.Test/Any", "worker:1", "http")


class Pair:
    """A core and a server, their bytes carried by hand."""

    def __init__(self, limits: ChannelLimits | None = None, **settings: int) -> None:
        self.core = ClientProtocol(limits or ChannelLimits())
        self.server: H2Connection = new_server(**settings)
        self.to_client()
        self.to_server()

    def to_server(self) -> list[object]:
        return list(self.server.receive_data(self.core.take_output()))

    def to_client(self) -> list[Event]:
        return self.core.receive(self.server.data_to_send())

    def open(self) -> int:
        stream_id = self.core.open(REQUEST)
        self.core.send(stream_id, frame_message(b"?"), end=True)
        self.to_server()
        return stream_id

    def reply(self, stream_id: int, *messages: bytes, trailers: list[tuple[str, str]] = OK) -> None:
        self.server.send_headers(stream_id, HEAD)
        for message in messages:
            self.server.send_data(stream_id, frame_message(message))
        self.server.send_headers(stream_id, trailers, end_stream=True)


def ended(events: list[Event]) -> Ended:
    (event,) = [event for event in events if isinstance(event, Ended)]
    return event


def test_a_reply_gives_its_head_its_messages_and_its_end():
    pair = Pair()
    stream_id = pair.open()
    pair.reply(stream_id, b"one", b"two")
    head, *messages, end = pair.to_client()
    assert isinstance(head, HeadReceived)
    assert messages == [MessageReceived(stream_id, b"one"), MessageReceived(stream_id, b"two")]
    assert isinstance(end, Ended)
    assert end.status is Status.OK
    assert pair.core.open_streams == 0


@given(
    st.lists(st.lists(st.binary(max_size=60), max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(min_value=0), max_size=40),
)
def test_events_are_the_same_however_the_bytes_were_split(replies, places):
    def run(split: bool) -> list[Event]:
        pair = Pair()
        for messages in replies:
            pair.reply(pair.open(), *messages)
        data = pair.server.data_to_send()
        return [event for piece in (cut(data, places) if split else [data]) for event in pair.core.receive(piece)]

    assert run(split=True) == run(split=False)


@given(st.binary(max_size=200))
@example(b"HTTP/1.1 400 Bad Request\r\n\r\n")
@example(bytes(9 * 100))
def test_garbage_from_the_start_never_raises_and_never_ends_a_call_well(data):
    core = ClientProtocol(ChannelLimits())
    stream_id = core.open(REQUEST, end=True)
    events = core.receive(data)
    assert not any(isinstance(event, Ended) and event.status is Status.OK for event in events)
    assert Ended(stream_id, Status.OK) not in events
    core.take_output()


def frame(kind: int, flags: int, stream_id: int, body: bytes) -> bytes:
    return len(body).to_bytes(3, "big") + bytes([kind, flags]) + stream_id.to_bytes(4, "big") + body


odd_frames = st.builds(frame, st.integers(0, 12), st.integers(0, 255), st.sampled_from([0, 1, 2, 3, 5, 7]), st.binary(max_size=40))


@given(st.lists(odd_frames, max_size=8), st.lists(st.integers(min_value=0), max_size=10))
def test_odd_frames_never_raise_and_each_stream_ends_once(sent, places):
    pair = Pair()
    opened = [pair.open(), pair.open()]
    pair.server.send_headers(opened[0], HEAD)
    pair.to_client()
    events = [event for piece in cut(b"".join(sent), places) for event in pair.core.receive(piece)]
    pair.core.take_output()
    over = [event.stream_id for event in events if isinstance(event, Ended)]
    assert len(set(over)) == len(over)
    assert set(over) <= set(opened)
    if any(isinstance(event, Broken) for event in events):
        assert isinstance(events[-1], Broken)
        assert pair.core.receive(b"anything") == []
    else:
        assert pair.core.open_streams == len(opened) - len(over)


def test_a_reply_of_headers_alone_carries_the_error():
    pair = Pair()
    stream_id = pair.open()
    pair.server.send_headers(stream_id, [*HEAD, ("grpc-status", "5"), ("grpc-message", "no")], end_stream=True)
    assert pair.to_client() == [
        Ended(stream_id, Status.NOT_FOUND, "no", None, [*encoded(HEAD), (b"grpc-status", b"5"), (b"grpc-message", b"no")])
    ]


def encoded(headers: list[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in headers]


@pytest.mark.parametrize(
    ("head", "status", "text"),
    [
        ([(":status", "404")], Status.UNIMPLEMENTED, "HTTP 404"),
        ([(":status", "503"), ("content-type", "text/html")], Status.UNAVAILABLE, "HTTP 503"),
        ([(":status", "200")], Status.UNKNOWN, "content-type"),
        ([(":status", "200"), ("content-type", "application/json")], Status.UNKNOWN, "application/json"),
    ],
)
def test_what_is_no_grpc_ends_the_call_at_its_headers(head, status, text):
    pair = Pair()
    stream_id = pair.open()
    pair.server.send_headers(stream_id, head)
    end = ended(pair.to_client())
    assert end.status is status
    assert text in (end.message or "")
    assert any(isinstance(event, StreamReset) for event in pair.to_server())


@pytest.mark.parametrize(
    ("data", "status", "text"),
    [
        (b"\0\0\0\0\5ab", Status.INTERNAL, "cut off: 3 bytes of a message are missing"),
        (b"\0\0", Status.INTERNAL, "cut off: 2 of the 5 bytes"),
        (b"", Status.INTERNAL, "ended without trailers"),
        (b"\1\0\0\0\1x", Status.INTERNAL, "compressed"),
        (b"garbage", Status.INTERNAL, "not gRPC"),
        (b"\0\xff\xff\xff\xff", Status.RESOURCE_EXHAUSTED, "max_message_bytes"),
    ],
)
def test_malformed_data_at_the_end_of_a_reply_is_an_error(data, status, text):
    pair = Pair()
    stream_id = pair.open()
    pair.server.send_headers(stream_id, HEAD)
    pair.server.send_data(stream_id, data, end_stream=True)
    end = ended(pair.to_client())
    assert end.status is status
    assert text in (end.message or "")


def test_trailers_inside_a_message_are_an_error_though_they_say_ok():
    pair = Pair()
    stream_id = pair.open()
    pair.server.send_headers(stream_id, HEAD)
    pair.server.send_data(stream_id, b"\0\0\0\0\5ab")
    pair.server.send_headers(stream_id, OK, end_stream=True)
    end = ended(pair.to_client())
    assert end.status is Status.INTERNAL
    assert "cut off" in (end.message or "")


def test_data_before_headers_is_an_error_of_that_call_alone():
    pair = Pair()
    first, second = pair.open(), pair.open()
    events = pair.core.receive(DataFrame(first, frame_message(b"x")).serialize())
    assert ended(events).status is Status.INTERNAL
    pair.reply(second, b"fine")
    assert ended(pair.to_client()).status is Status.OK


@pytest.mark.parametrize("stream_id", [2, 99])
def test_data_on_a_stream_that_was_never_opened_breaks_the_connection(stream_id):
    pair = Pair()
    pair.open()
    (event,) = pair.core.receive(DataFrame(stream_id, b"x").serialize())
    assert isinstance(event, Broken)
    assert not pair.core.takes_streams
    assert pair.core.take_output()  # a GOAWAY


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (ErrorCodes.CANCEL, Status.CANCELLED),
        (ErrorCodes.INTERNAL_ERROR, Status.INTERNAL),
        (ErrorCodes.NO_ERROR, Status.INTERNAL),
        (ErrorCodes.ENHANCE_YOUR_CALM, Status.RESOURCE_EXHAUSTED),
        (ErrorCodes.INADEQUATE_SECURITY, Status.PERMISSION_DENIED),
        (0xFF, Status.INTERNAL),
    ],
)
def test_a_reset_by_the_worker_maps_to_a_status(code, status):
    pair = Pair()
    stream_id = pair.open()
    pair.server.reset_stream(stream_id, code)
    end = ended(pair.to_client())
    assert end.status is status
    assert not end.unprocessed


def test_a_refused_stream_was_not_processed():
    pair = Pair()
    stream_id = pair.open()
    pair.server.reset_stream(stream_id, ErrorCodes.REFUSED_STREAM)
    end = ended(pair.to_client())
    assert end.lost
    assert end.unprocessed


def test_after_a_goaway_running_streams_finish_and_later_ones_are_unprocessed():
    pair = Pair()
    first, second = pair.open(), pair.open()
    events = pair.core.receive(GoAwayFrame(0, first, 0, b"bye").serialize())
    assert GoingAway("the worker closes the connection: NO_ERROR (bye)") in events
    assert ended(events).stream_id == second
    assert ended(events).unprocessed
    assert not pair.core.takes_streams
    pair.reply(first, b"done")
    assert ended(pair.to_client()).status is Status.OK


def test_a_cancelled_stream_is_reset_and_what_still_comes_is_dropped():
    pair = Pair()
    stream_id = pair.open()
    pair.server.send_headers(stream_id, HEAD)
    pair.server.send_data(stream_id, frame_message(b"late"))
    late = pair.server.data_to_send()
    pair.core.reset(stream_id)
    (event,) = [event for event in pair.to_server() if isinstance(event, StreamReset)]
    assert event.error_code is ErrorCodes.CANCEL
    assert pair.core.receive(late) == []
    pair.core.take_output()
    pair.core.reset(stream_id)
    assert pair.core.take_output() == b""


def test_an_early_end_by_the_worker_stops_our_sending():
    pair = Pair()
    stream_id = pair.core.open(REQUEST)
    pair.to_server()
    pair.server.send_headers(stream_id, [*HEAD, ("grpc-status", "11")], end_stream=True)
    assert ended(pair.to_client()).status is Status.OUT_OF_RANGE
    assert pair.core.send(stream_id, b"more", end=True) == 4
    assert any(isinstance(event, StreamReset) for event in pair.to_server())


@pytest.mark.parametrize("code", [ErrorCodes.NO_ERROR, ErrorCodes.CANCEL])
def test_an_early_end_with_a_reset_right_behind_ends_that_call_alone(code):
    """As vLLM's server refuses a message that is too large, while it is still being sent."""
    pair = Pair()
    other = pair.open()
    stream_id = pair.core.open(REQUEST)
    pair.core.send(stream_id, b"x" * 100, end=False)
    pair.to_server()
    pair.server.send_headers(stream_id, [*HEAD, ("grpc-status", "11")], end_stream=True)
    pair.server.reset_stream(stream_id, code)
    (event,) = pair.to_client()
    assert isinstance(event, Ended)
    assert (event.stream_id, event.status) == (stream_id, Status.OUT_OF_RANGE)
    pair.reply(other)
    assert ended(pair.to_client()).status is Status.OK


def test_a_reset_that_waited_is_dropped_when_the_worker_has_ended_the_stream():
    pair = Pair()
    streams = [pair.open() for _ in range(BURST + 1)]
    for stream_id in streams:
        pair.core.reset(stream_id)
    resets = [event for event in pair.to_server() if isinstance(event, StreamReset)]
    assert len(resets) == BURST
    pair.reply(streams[-1])
    assert not [event for event in pair.to_client() if isinstance(event, Broken)]
    pair.reply(pair.open())
    assert ended(pair.to_client()).status is Status.OK


def test_sending_stops_at_the_window_and_goes_on_when_it_opens():
    pair = Pair(initial_window_size=10)
    stream_id = pair.core.open(REQUEST)
    assert pair.core.send(stream_id, bytes(25), end=True) == 10
    assert pair.core.send(stream_id, bytes(15), end=True) == 0
    received = [event for event in pair.to_server() if isinstance(event, DataReceived)]
    assert sum(len(event.data or b"") for event in received) == 10
    pair.server.increment_flow_control_window(15, stream_id)
    pair.to_client()
    assert pair.core.send(stream_id, bytes(15), end=True) == 15
    assert any(isinstance(event, DataReceived) and event.stream_ended for event in pair.to_server())


def test_frames_are_no_larger_than_the_worker_takes():
    pair = Pair(initial_window_size=2**20)
    stream_id = pair.core.open(REQUEST)
    pair.core.send(stream_id, bytes(50_000), end=True)
    sizes = [len(event.data or b"") for event in pair.to_server() if isinstance(event, DataReceived)]
    assert sizes == [16384, 16384, 16384, 848]


def updates(output: bytes) -> dict[int, int]:
    """The window updates in what the core sends, by stream."""
    found: dict[int, int] = {}
    while output:
        length = int.from_bytes(output[:3], "big")
        if output[3] == WindowUpdateFrame.type:
            stream_id = int.from_bytes(output[5:9], "big")
            found[stream_id] = found.get(stream_id, 0) + int.from_bytes(output[9:13], "big")
        output = output[9 + length :]
    return found


SMALL = ChannelLimits(stream_window=1000, connection_window=65_535, max_message_bytes=5000)


def test_credit_for_a_stream_waits_until_its_messages_are_taken():
    pair = Pair(SMALL)
    stream_id = pair.open()
    pair.server.send_headers(stream_id, HEAD)
    pair.server.send_data(stream_id, frame_message(bytes(495)))
    pair.to_client()
    assert updates(pair.core.take_output()) == {}
    assert pair.core.took(stream_id, 500)
    assert updates(pair.core.take_output()) == {stream_id: 500}


def test_a_message_larger_than_the_window_gets_through():
    pair = Pair(SMALL)
    stream_id = pair.open()
    pair.server.send_headers(stream_id, HEAD)
    data = frame_message(bytes(4000))
    messages: list[Event] = []
    while data:
        room = min(pair.server.local_flow_control_window(stream_id), len(data))
        assert room > 0, "the worker may not send any more"
        pair.server.send_data(stream_id, data[:room])
        data = data[room:]
        messages += [event for event in pair.to_client() if isinstance(event, MessageReceived)]
        pair.to_server()
    assert messages == [MessageReceived(stream_id, bytes(4000))]


@pytest.mark.parametrize("reset", [False, True])
def test_credit_for_the_connection_comes_back_whether_or_not_anybody_reads(reset):
    pair = Pair(ChannelLimits(stream_window=200_000, connection_window=65_535))
    stream_id = pair.open()
    pair.server.send_headers(stream_id, HEAD)
    pair.to_client()
    if reset:
        pair.core.reset(stream_id)
        pair.core.take_output()
    for _ in range(10):
        data = frame_message(bytes(16_000))
        pair.server.send_data(stream_id, data)
        pair.to_client()
        pair.to_server()
    assert pair.server.outbound_flow_control_window >= 65_535 * 3 // 4


def test_a_worker_that_ignores_the_window_breaks_the_connection():
    pair = Pair(SMALL)
    stream_id = pair.open()
    pair.server.send_headers(stream_id, HEAD)
    pair.to_client()
    event = pair.core.receive(DataFrame(stream_id, frame_message(bytes(1200))).serialize())[-1]
    assert isinstance(event, Broken)
    assert "window" in event.reason


def test_a_header_list_over_the_limit_breaks_the_connection():
    pair = Pair(ChannelLimits(max_header_bytes=1000))
    stream_id = pair.open()
    pair.server.send_headers(stream_id, [*HEAD, ("filler", "x" * 2000)])
    (event,) = pair.to_client()
    assert isinstance(event, Broken)
    assert "header" in event.reason.lower()


def test_a_pushed_stream_breaks_the_connection():
    pair = Pair()
    stream_id = pair.open()
    body = (2).to_bytes(4, "big")
    (event,) = pair.core.receive(frame(0x5, 0x4, stream_id, body))
    assert isinstance(event, Broken)


def test_a_ping_is_answered():
    pair = Pair()
    pair.server.ping(b"12345678")
    assert pair.to_client() == []
    assert b"12345678" in pair.core.take_output()


def test_a_burst_of_early_resets_goes_out_in_steps_that_the_worker_answers():
    pair = Pair()
    streams = [pair.core.open(REQUEST, end=True) for _ in range(3 * BURST)]
    for stream_id in streams:
        pair.core.reset(stream_id)
    for step in range(3):
        events = pair.to_server()
        assert sum(isinstance(event, RequestReceived) for event in events) == (0 if step else 3 * BURST)
        assert sum(isinstance(event, StreamReset) for event in events) == BURST
        assert sum(isinstance(event, RemoteSettingsChanged) for event in events) == (step < 2)
        assert pair.core.takes_streams == (step == 2)
        pair.to_client()


def test_streams_that_were_answered_are_reset_at_once():
    pair = Pair()
    streams = [pair.open() for _ in range(50)]
    pair.server.send_headers(streams[-1], HEAD)
    pair.to_client()
    for stream_id in streams:
        pair.core.reset(stream_id)
    assert pair.core.takes_streams
    assert sum(isinstance(event, StreamReset) for event in pair.to_server()) == 50
