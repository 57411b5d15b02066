"""Our own names of blocks: what a block of tokens is called depends on everything before it, and on whose KV it is.

Engines name blocks by digests that take long to compute, or can't be computed outside at all. We compute our own from what their events
tell, and the same from a call: 64 bytes at a time through Python's own `hash`, keyed, in a fraction of a microsecond. The names are good
within this process only. They are cut to 60 bits, which take a third less memory; with ten million blocks, two have the same name with a
probability of one to twenty thousand.
"""

from array import array
from collections.abc import Sequence
from typing import Any, Final

from core import Call

BlockName = int

_60_BITS: Final = 2**60 - 1
#: What stands after a block's tokens for the media in it.
Places = tuple[tuple[str, int], ...]
TOKEN_BYTES: Final = array("I").itemsize


def root(namespace: str, adapter: str, media: Sequence[str] = ()) -> BlockName:
    """What the first block of a prompt has for its parent. `media`: those of which nobody knows where in the prompt they will be."""
    return hash((namespace, adapter, tuple(media))) & _60_BITS


def name_of(parent: BlockName, tokens: bytes, extra: Any = None) -> BlockName:
    """The name of a block; `tokens` is `packed`, `extra` whatever else makes it differ, hashable."""
    return hash((parent, tokens) if extra is None else (parent, tokens, extra)) & _60_BITS


def packed(token_ids: Sequence[int]) -> bytes:
    """Token ids, four bytes each. Raises: `OverflowError` for an id that isn't one."""
    return array("I", token_ids).tobytes()


class Prompt:
    """The names of a call's full blocks under a salt, computed as far as somebody asks."""

    def __init__(self, call: Call, block_size: int, namespace: str) -> None:
        identity = call.identity
        self.block_size = block_size
        #: So many full blocks there are.
        self.length = len(call.token_ids) // block_size
        #: False when what will be in the prompt isn't known here: media that the worker expands.
        self.known = len(identity.media_ranges) == len(identity.media)
        #: The names of the first blocks.
        self.names: list[BlockName] = []
        media = identity.media_under(namespace)
        self._last = root(namespace, identity.adapter, () if self.known else media)
        self._data = packed(call.token_ids)
        self._media = list(zip(media, identity.media_ranges, strict=True)) if self.known else []

    def reach(self, length: int) -> list[BlockName]:
        """Compute the names of the first `length` blocks, if there are so many; returns all that are computed."""
        names, data, name = self.names, self._data, self._last
        first, end, step = len(names), min(length, self.length), self.block_size * TOKEN_BYTES
        if first >= end:
            return names
        if self._media:
            for index in range(first, end):
                tokens = data[index * step : (index + 1) * step]
                names.append(name_of(names[-1] if names else name, tokens, self._places(index * self.block_size) or None))
        else:
            # `name_of`, without the calls: a prompt has thousands of blocks.
            names += [name := hash((name, data[at : at + step])) & _60_BITS for at in range(first * step, end * step, step)]
        self._last = names[-1]
        return names

    def _places(self, start: int) -> Places:
        """The media in the block that starts at this token, each with its place relative to it (vLLM 0.31: may be negative)."""
        end = start + self.block_size
        return tuple((medium, offset - start) for medium, (offset, length) in self._media if offset < end and offset + length > start)
