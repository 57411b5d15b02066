"""The header of a `.npy` file of version 1.0, read by hand: nobody here needs NumPy, or a single number of the array.

What is accepted is what vLLM writes: whole numbers, little endian, row-major, in three dimensions.
"""

import binascii
import re
from math import prod
from typing import Final

from msgspec import Struct

_MAGIC: Final = b"\x93NUMPY\x01\x00"
_PREFIX: Final = len(_MAGIC) + 2
#: NumPy pads its headers to 64 bytes, and three dimensions take less than two of these; the base64 of as many bytes, and more.
_HEAD: Final = 512
_HEADER: Final = re.compile(
    rb"\{'descr': '(?:\||<)([iu])([1248])', 'fortran_order': False, 'shape': \((\d{1,12}), (\d{1,12}), (\d{1,12})\),? *\} *\n"
)
_KINDS: Final = {b"i": "int", b"u": "uint"}


class Npy(Struct, frozen=True):
    """What a header says. `offset` is where the data starts, in bytes; `dtype` is NumPy's name (`uint8`)."""

    shape: tuple[int, int, int]
    dtype: str
    offset: int
    #: Of the data, in bytes.
    size: int


def read_header(encoded: str) -> Npy:
    """The header of a file in base64, of which only the beginning is decoded.

    Raises: `ValueError` for what is no such file.
    """
    head = binascii.a2b_base64(encoded[:_HEAD], strict_mode=True)
    if not head.startswith(_MAGIC):
        raise ValueError("it is no .npy file of version 1.0")
    offset = _PREFIX + int.from_bytes(head[len(_MAGIC) : _PREFIX], "little")
    found = _HEADER.fullmatch(head[_PREFIX:offset])
    if not found:
        header = head[_PREFIX:offset]
        raise ValueError(f"its header is not that of a row-major, little-endian array of whole numbers in three dimensions: {header!r}")
    kind, width, *lengths = found.groups()
    rows, layers, slots = map(int, lengths)
    return Npy((rows, layers, slots), f"{_KINDS[kind]}{8 * int(width)}", offset, prod((rows, layers, slots)) * int(width))


def read_data(encoded: str, header: Npy) -> memoryview:
    """The array's bytes, decoded once and copied no further.

    Raises: `ValueError` when they are not as many as the header says.
    """
    data = memoryview(binascii.a2b_base64(encoded, strict_mode=True))[header.offset :]
    if len(data) != header.size:
        raise ValueError(f"it has {len(data)} bytes of data where its header promises {header.size}")
    return data
