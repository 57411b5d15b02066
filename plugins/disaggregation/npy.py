"""Rows of two `.npy` files, as vLLM gives routed experts, in one file."""

import base64
import re
from typing import Any, Final

_MAGIC: Final = b"\x93NUMPY\x01\x00"
_HEADER: Final = len(_MAGIC) + 2
_ROWS: Final = re.compile(rb"('shape': \()(\d{1,12})(, )")


def join(first: Any, first_rows: int, second: Any, second_rows: int) -> Any:
    """The rows of two files in base64, one after the other; a file of which no rows are expected may be missing.

    Raises: `ValueError` or `TypeError` when one has other rows than expected, or they are not of one kind.
    """
    if not second_rows and second is None:
        return _checked(first, first_rows, "prefill")
    if not first_rows and first is None:
        return _checked(second, second_rows, "decode")
    head, data = _parts(first, first_rows, "prefill")
    other, more = _parts(second, second_rows, "decode")
    if _ROWS.sub(b"", head).rstrip() != _ROWS.sub(b"", other).rstrip():
        raise ValueError("they differ in type or shape")
    joined = _ROWS.sub(rb"\g<1>%d\g<3>" % (first_rows + second_rows), head).rstrip()
    joined += b" " * (-(_HEADER + len(joined) + 1) % 64) + b"\n"
    return base64.b64encode(b"".join((_MAGIC, len(joined).to_bytes(2, "little"), joined, data, more))).decode()


def _checked(encoded: Any, rows: int, whose: str) -> Any:
    _parts(encoded, rows, whose)
    return encoded


def _parts(encoded: Any, rows: int, whose: str) -> tuple[bytes, memoryview]:
    """The header and the data of a file."""
    if not isinstance(encoded, str):
        raise TypeError(f"{whose} gave none: start vLLM with --enable-return-routed-experts")
    file = memoryview(base64.b64decode(encoded, validate=True))
    end = _HEADER + int.from_bytes(file[len(_MAGIC) : _HEADER], "little")
    head = bytes(file[_HEADER:end])
    found = _ROWS.search(head)
    if bytes(file[: len(_MAGIC)]) != _MAGIC or not found:
        raise ValueError(f"what {whose} gave is no .npy file of version 1.0")
    if int(found[2]) != rows:
        raise ValueError(f"{whose} gave {int(found[2])} rows instead of {rows}")
    return head, file[end:]
