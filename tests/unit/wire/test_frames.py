import pytest
from hyperframe.frame import DataFrame, GoAwayFrame, HeadersFrame, PingFrame, WindowUpdateFrame
from hypothesis import given
from hypothesis import strategies as st

from core.wire.grpc.frames import Data, FrameCutter, FrameError, GoAway
from tests.unit.wire.splits import cut

MAX = 2**20


def data_frame(stream_id: int, payload: bytes, *, end: bool = False, pad: int | None = None) -> bytes:
    frame = DataFrame(stream_id, payload, flags=["END_STREAM"] if end else [])
    if pad is not None:
        frame.flags.add("PADDED")
        frame.pad_length = pad
    return frame.serialize()


frames = st.one_of(
    st.builds(
        data_frame,
        st.integers(1, 9),
        st.binary(max_size=40),
        end=st.booleans(),
        pad=st.none() | st.integers(0, 20),
    ),
    st.binary(min_size=8, max_size=8).map(lambda data: PingFrame(0, data).serialize()),
    st.integers(1, 2**31 - 1).map(lambda size: WindowUpdateFrame(0, size).serialize()),
    st.binary(max_size=40).map(lambda data: HeadersFrame(1, data).serialize()),
    st.builds(lambda last, debug: GoAwayFrame(0, last, 11, debug).serialize(), st.integers(0, 99), st.binary(max_size=30)),
)


def joined(pieces: list[bytes | Data | GoAway]) -> list[object]:
    """Pieces with neighbours of one kind put together, as splits may fall anywhere."""
    result: list[object] = []
    for piece in pieces:
        last = result[-1] if result else None
        match piece:
            case bytes() if isinstance(last, bytes):
                result[-1] = last + piece
            case Data() if isinstance(last, Data) and last.stream_id == piece.stream_id and not last.end:
                payload = bytes(last.payload) + bytes(piece.payload)
                result[-1] = Data(piece.stream_id, payload, last.size + piece.size, piece.end)
            case Data():
                result.append(Data(piece.stream_id, bytes(piece.payload), piece.size, piece.end))
            case _:
                result.append(piece)
    return result


@given(st.lists(frames, max_size=8), st.lists(st.integers(min_value=0), max_size=20))
def test_pieces_are_the_same_however_the_bytes_were_split(sent, places):
    stream = b"".join(sent)
    whole = FrameCutter(MAX).feed(stream)
    cutter = FrameCutter(MAX)
    assert joined([piece for part in cut(stream, places) for piece in cutter.feed(part)]) == joined(whole)


def test_only_data_and_goaway_are_taken_out():
    ping = PingFrame(0, b"12345678").serialize()
    headers = HeadersFrame(1, b"abc").serialize()
    goaway = GoAwayFrame(0, 7, 11, b"calm").serialize()
    stream = ping + headers + data_frame(3, b"x") + ping + goaway + headers
    assert FrameCutter(MAX).feed(stream) == [
        ping + headers,
        Data(3, b"x", 1, False),
        ping,
        GoAway(7, 11, b"calm"),
        headers,
    ]


def test_padding_counts_for_flow_control_only():
    assert FrameCutter(MAX).feed(data_frame(1, b"abc", pad=4, end=True)) == [Data(1, b"abc", 8, True)]


def test_large_payloads_are_not_copied():
    (piece,) = FrameCutter(MAX).feed(data_frame(1, bytes(100_000)))
    assert isinstance(piece, Data)
    assert isinstance(piece.payload, memoryview)


def test_a_frame_over_the_limit_is_an_error_before_it_has_come():
    with pytest.raises(FrameError, match=r"a frame of 1048577 bytes came, the limit is 1048576"):
        FrameCutter(MAX).feed(b"\x10\x00\x01\x00\x00\x00\x00\x00\x01")


def test_padding_beyond_the_frame_is_an_error():
    with pytest.raises(FrameError, match="padded beyond its end"):
        FrameCutter(MAX).feed(b"\0\0\2\0\x08\0\0\0\1" + b"\x05x")


@pytest.mark.parametrize("size", [0, 7])
def test_a_goaway_that_is_too_short_is_an_error(size):
    with pytest.raises(FrameError, match="GOAWAY"):
        FrameCutter(MAX).feed(bytes([0, 0, size, 7, 0, 0, 0, 0, 0]) + bytes(size))
