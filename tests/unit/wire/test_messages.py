import pytest
from grpclib.const import Status
from hypothesis import given
from hypothesis import strategies as st

from core.wire.grpc.messages import BadMessage, MessageReader, frame_message
from tests.unit.wire.splits import cut

LIMIT = 1000


@given(st.lists(st.binary(max_size=50), max_size=8), st.lists(st.integers(min_value=0), max_size=20))
def test_messages_are_the_same_however_their_bytes_were_split(messages, places):
    reader = MessageReader(LIMIT)
    pieces = cut(b"".join(map(frame_message, messages)), places)
    assert [message for piece in pieces for message in reader.feed(piece)] == messages
    assert reader.inside is None


@given(st.lists(st.binary(max_size=50), max_size=8), st.lists(st.integers(min_value=0), max_size=20))
def test_pieces_may_be_memory_views(messages, places):
    reader = MessageReader(LIMIT)
    pieces = cut(b"".join(map(frame_message, messages)), places)
    assert [message for piece in pieces for message in reader.feed(memoryview(piece))] == messages


@given(st.binary(min_size=1, max_size=40), st.integers(min_value=1, max_value=44))
def test_a_truncated_message_is_noticed(message, missing):
    data = frame_message(message)
    data = data[: max(1, len(data) - missing)]
    reader = MessageReader(LIMIT)
    assert reader.feed(data) == []
    assert reader.inside is not None


def test_a_message_over_the_limit_is_refused_by_its_length_alone():
    with pytest.raises(BadMessage, match=r"1001 bytes .* limit of 1000 .max_message_bytes") as caught:
        MessageReader(LIMIT).feed(b"\0" + (1001).to_bytes(4, "big"))
    assert caught.value.status is Status.RESOURCE_EXHAUSTED


def test_a_compressed_message_is_refused():
    with pytest.raises(BadMessage, match="compressed") as caught:
        MessageReader(LIMIT).feed(b"\1\0\0\0\1x")
    assert caught.value.status is Status.INTERNAL


def test_what_is_no_grpc_is_refused():
    with pytest.raises(BadMessage, match="not gRPC: a message begins with byte 60") as caught:
        MessageReader(LIMIT).feed(b"<html></html>")
    assert caught.value.status is Status.INTERNAL
