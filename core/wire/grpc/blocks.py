"""HPACK that remembers the header blocks which say nothing new.

All calls of a method begin with the same headers; nearly all replies begin, and end, with the same. Once these are in the compression
table, such a list is one byte for each header, and stays the same bytes until another header comes into the table. So it's encoded, and
decoded, once: hpack takes a quarter of what a small call costs in frames.
"""

from collections.abc import Iterable
from typing import Any, Final

from hpack import Decoder, Encoder, HeaderTuple

#: Blocks that are kept: a peer might think up as many as it likes.
_MOST: Final = 64


class RememberingEncoder(Encoder):
    """hpack's, as h2 uses it."""

    def __init__(self) -> None:
        super().__init__()
        self._blocks: dict[tuple[Any, ...], bytes] = {}

    def encode(self, headers: Iterable[Any], huffman: bool = True) -> bytes:
        """See hpack."""
        key = tuple(headers)
        block = self._blocks.get(key)
        # After the peer has resized the table, the next block has to say so.
        if block is None or self.header_table.resized:
            block = super().encode(key, huffman)
            if len(block) != len(key):
                self._blocks.clear()
            elif len(self._blocks) < _MOST:
                self._blocks[key] = block
        return block


class RememberingDecoder(Decoder):
    """hpack's, as h2 uses it."""

    def __init__(self) -> None:
        super().__init__()
        self._lists: dict[tuple[bytes, bool], list[HeaderTuple]] = {}

    def decode(self, data: bytes, raw: bool = False) -> Iterable[HeaderTuple]:
        """See hpack."""
        key = bytes(data), raw
        headers = self._lists.get(key)
        if headers is None:
            headers = list(super().decode(data, raw))
            if len(headers) != len(data):
                self._lists.clear()
            elif len(self._lists) < _MOST:
                self._lists[key] = headers
        return headers
