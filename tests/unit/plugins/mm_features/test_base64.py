"""Decoding by pieces is decoding."""

import base64
import binascii
import contextlib
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plugins.mm_features import base64 as by_pieces
from plugins.mm_features.base64 import decode_base64


@pytest.fixture(autouse=True, scope="module")
def short_pieces():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(by_pieces, "_PIECE", 8)
        yield


@given(st.binary(max_size=100))
def test_what_was_encoded_comes_back(data):
    text = base64.b64encode(data)
    assert decode_base64(text.decode()) == decode_base64(memoryview(text)) == data


@given(st.binary(max_size=40).map(base64.b64encode), st.integers(0, 60), st.sampled_from([b"=", b"====", b"AA==", b"!", b"A", b" ", b"\n"]))
def test_padding_or_anything_else_in_the_middle_is_refused_or_read_as_in_one_piece(text, at, more):
    text = text[:at] + more + text[at:]
    with contextlib.suppress(ValueError):
        assert decode_base64(memoryview(text)) == binascii.a2b_base64(text, strict_mode=True)


@pytest.mark.parametrize("text", ["AAAAAA==AAAA", "AAAAAAA=AAAAAAAA", "AAAA====AAAA", "AAAA AAAAAAA"])
def test_padding_or_a_space_in_the_middle_is_refused(text):
    with pytest.raises(ValueError, match=r"padding|base64 data"):
        decode_base64(text)


def test_what_is_not_ascii_is_refused():
    with pytest.raises(ValueError, match="ASCII"):
        decode_base64("AAAé")


def test_megabytes_in_real_pieces(monkeypatch):
    monkeypatch.setattr(by_pieces, "_PIECE", 1 << 20)
    data = os.urandom(3 << 20)
    assert decode_base64(base64.b64encode(data).decode()) == data
