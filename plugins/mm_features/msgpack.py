"""MessagePack, walked by hand: what is small becomes Python values, tensors only their sizes.

The whole walk is bounded in depth and in values, so that no input makes it slow or large.
"""

import struct
from typing import Any, Final

from msgspec import Struct

#: vLLM 0.33 goes no deeper.
MAX_DEPTH: Final = 32
#: An item of a real model has some thirty.
MAX_VALUES: Final = 4096

_CONSTANTS: Final = {0xC0: None, 0xC2: False, 0xC3: True}
_NUMBERS: Final = {
    code: struct.Struct(f">{kind}")
    for code, kind in zip((0xCA, 0xCB, 0xCC, 0xCD, 0xCE, 0xCF, 0xD0, 0xD1, 0xD2, 0xD3), "fdBHIQbhiq", strict=True)
}
_TEXTS: Final = {0xD9: 1, 0xDA: 2, 0xDB: 4}
_EXTENSIONS: Final = {0xC7: 1, 0xC8: 2, 0xC9: 4}
_FIXED_EXTENSIONS: Final = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
_ARRAYS: Final = {0xDC: 2, 0xDD: 4}
_MAPS: Final = {0xDE: 2, 0xDF: 4}


class Malformed(ValueError):
    """The bytes aren't what they should be; the text says why."""


class Extension(Struct, frozen=True):
    """An extension value: its type, and the size of its data in bytes."""

    type: int
    size: int


def walk(data: bytes) -> Any:
    """The one value that the data hold: `None`, numbers, strings, lists, dictionaries and `Extension`s.

    Raises: `Malformed` for what is no such value, for what follows it, and beyond the bounds.
    """
    walker = _Walker(data)
    value = walker.value(0)
    if walker.at != len(data):
        raise Malformed(f"{len(data) - walker.at} bytes follow its end")
    return value


class _Walker:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._values = 0
        self.at = 0

    def value(self, depth: int) -> Any:
        self._values += 1
        if self._values > MAX_VALUES or depth > MAX_DEPTH:
            raise Malformed(f"it has more than {MAX_VALUES} values, or is nested deeper than {MAX_DEPTH}")
        code = self._take(1)[0]
        if code < 0x80:
            return code
        if code < 0x90:
            return self._map(code & 0x0F, depth)
        if code < 0xA0:
            return self._array(code & 0x0F, depth)
        if code < 0xC0:
            return self._text(code & 0x1F)
        if code >= 0xE0:
            return code - 0x100
        return self._longer(code, depth)

    def _longer(self, code: int, depth: int) -> Any:
        """A value whose length, or number, stands in the bytes after its code."""
        if code in _CONSTANTS:
            return _CONSTANTS[code]
        if number := _NUMBERS.get(code):
            return number.unpack(self._take(number.size))[0]
        if width := _TEXTS.get(code):
            return self._text(self._length(width))
        if size := _FIXED_EXTENSIONS.get(code):
            return self._extension(size)
        if width := _EXTENSIONS.get(code):
            return self._extension(self._length(width))
        if width := _ARRAYS.get(code):
            return self._array(self._length(width), depth)
        if width := _MAPS.get(code):
            return self._map(self._length(width), depth)
        raise Malformed(f"byte {self.at - 1} is {code:#04x}, which starts nothing that may stand there")

    def _map(self, length: int, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for _ in range(length):
            key = self.value(depth + 1)
            if not isinstance(key, str) or key in found:
                raise Malformed("a key is no string, or stands twice")
            found[key] = self.value(depth + 1)
        return found

    def _array(self, length: int, depth: int) -> list[Any]:
        return [self.value(depth + 1) for _ in range(length)]

    def _text(self, length: int) -> str:
        try:
            return self._take(length).decode()
        except UnicodeDecodeError as error:
            raise Malformed("a string is no UTF-8") from error

    def _extension(self, size: int) -> Extension:
        type_ = int.from_bytes(self._take(1), signed=True)
        self._skip(size)
        return Extension(type_, size)

    def _length(self, width: int) -> int:
        return int.from_bytes(self._take(width))

    def _take(self, size: int) -> bytes:
        start = self.at
        self._skip(size)
        return self._data[start : self.at]

    def _skip(self, size: int) -> None:
        self.at += size
        if self.at > len(self._data):
            raise Malformed("it is cut off")
