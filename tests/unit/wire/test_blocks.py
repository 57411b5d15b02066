"""Remembered header blocks: what hpack itself makes of them, in whatever order they come."""

import pytest
from hpack import Decoder, Encoder, HeaderTuple, InvalidTableIndexError, NeverIndexedHeaderTuple
from hypothesis import given
from hypothesis import strategies as st

from core.wire.grpc.blocks import RememberingDecoder, RememberingEncoder

NAMES = st.sampled_from([b":method", b":path", b"te", b"x-a", b"x-b"])
VALUES = st.sampled_from([b"POST", b"GET", b"/a", b"/b", b"trailers", b"", b"x" * 60])
HEADERS = st.builds(HeaderTuple, NAMES, VALUES) | st.builds(NeverIndexedHeaderTuple, NAMES, VALUES)
#: A list to encode, or a size for the table.
STEPS = st.lists(st.lists(HEADERS, max_size=4) | st.sampled_from([0, 40, 100, 4096]), max_size=40)

CALL = [(b":method", b"POST"), (b":path", b"/vllm.Inference/Generate"), (b"te", b"trailers")]


@given(STEPS)
def test_whatever_is_encoded_is_decoded_to_the_same(steps):
    encoder, decoder = RememberingEncoder(), RememberingDecoder()
    plain_encoder, plain_decoder = Encoder(), Decoder()
    for step in steps:
        if isinstance(step, int):
            if step != encoder.header_table_size:  # hpack 4.2 forgets a change when it's told twice
                encoder.header_table_size = plain_encoder.header_table_size = step
            continue
        block = encoder.encode(step)
        assert block == plain_encoder.encode(step)
        assert decoder.decode(block, raw=True) == plain_decoder.decode(block, raw=True) == step


def test_the_same_headers_are_encoded_and_decoded_once():
    encoder, decoder = RememberingEncoder(), RememberingDecoder()
    decoder.decode(encoder.encode(CALL), raw=True)
    first, second = encoder.encode(CALL), encoder.encode(CALL)
    assert second is first
    assert decoder.decode(first, raw=True) is decoder.decode(second, raw=True)


def test_the_blocks_of_no_peer_fill_the_memory():
    decoder = RememberingDecoder()
    for first in range(2, 15):
        for second in range(2, 15):
            decoder.decode(bytes([0x80 | first, 0x80 | second]), raw=True)
    assert len(decoder._lists) == 64


def test_an_index_beyond_the_table_is_an_error_each_time():
    decoder = RememberingDecoder()
    for _ in range(2):
        with pytest.raises(InvalidTableIndexError):
            decoder.decode(b"\xfe", raw=True)
