"""Reading `.npy` files: what vLLM writes is read to the last byte, anything else is refused by name."""

import base64
import binascii
import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plugins.routed_experts.npy import read_data, read_header
from tests.unit.plugins.routed_experts.files import counted, encoded, npy

DTYPES = {"|u1": "uint8", "|i1": "int8", "<u2": "uint16", "<i4": "int32", "<u4": "uint32", "<i8": "int64"}


def base64_of(file: bytes) -> str:
    return base64.b64encode(file).decode()


@pytest.mark.parametrize(("descr", "dtype"), DTYPES.items())
@pytest.mark.parametrize("shape", [(7, 2, 2), (1, 1, 1), (0, 48, 8), (40, 48, 8)])
def test_every_width_and_shape_is_read_without_a_byte_lost(descr, dtype, shape):
    text = encoded(shape, descr)
    header = read_header(text)
    assert (header.shape, header.dtype) == (shape, dtype)
    assert bytes(read_data(text, header)) == counted(header.size)


def test_the_file_of_a_real_engine_is_read():
    text = (
        "k05VTVBZAQB2AHsnZGVzY3InOiAnfHUxJywgJ2ZvcnRyYW5fb3JkZXInOiBGYWxzZSwgJ3NoYXBlJzogKDcsIDIsIDIpLCB9ICAgICAgICAgICAgICAgICAgICAg"
        "ICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgIAoCBQQCAgQEBgEEBAIEAgACAgAEAgIEBAIBAwQC"
    )
    header = read_header(text)
    assert (header.shape, header.dtype) == ((7, 2, 2), "uint8")
    assert list(read_data(text, header)[:4]) == [2, 5, 4, 2]


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        (b"", "no .npy file"),
        (b"PK\x03\x04", "no .npy file"),
        (npy((2, 2, 2), version=2), "no .npy file of version 1.0"),
        (npy((2, 2, 2), fortran=True), "row-major"),
        (npy((2, 2, 2), ">u2"), "little-endian"),
        (npy((2, 2, 2), "<f4"), "whole numbers"),
        (npy((2, 2)), "three dimensions"),
        (npy((2, 2, 2, 2)), "three dimensions"),
        (npy((2, 2, 2))[:40], "its header"),
        (b"\x93NUMPY\x01\x00\xff\xff{", "its header"),
    ],
)
def test_another_file_is_refused_with_the_reason(file, reason):
    with pytest.raises(ValueError, match=reason):
        read_header(base64_of(file))


@pytest.mark.parametrize("file", [npy((2, 2, 2))[:-1], npy((2, 2, 2)) + b"x"])
def test_a_file_that_is_too_short_or_too_long_is_refused(file):
    text = base64_of(file)
    with pytest.raises(ValueError, match=r"it has [79] bytes of data where its header promises 8"):
        read_data(text, read_header(text))


def test_what_is_not_base64_after_the_header_is_refused():
    text = encoded((2000, 2, 2))
    with pytest.raises(binascii.Error):
        read_data(text[:-4] + "!!!!", read_header(text))


@given(st.text() | st.binary().map(base64_of) | st.binary().map(lambda tail: base64_of(npy((2, 2, 2))[:70] + tail)))
def test_whatever_comes_is_read_or_refused(text):
    with contextlib.suppress(ValueError):
        read_data(text, read_header(text))
