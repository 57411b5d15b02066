"""Which blocks of tokens an engine would have in its KV cache. Only the keys: there is nothing to store."""

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import blake2b


class PrefixCache:
    """Full blocks of `block_size` tokens, found again under the same salt and adapter; at most `capacity` of them.

    The least recently used block goes first.
    """

    def __init__(self, block_size: int, capacity: int) -> None:
        self.block_size = block_size
        self.capacity = capacity
        self.queries = 0  #: prompt tokens that were looked up
        self.hits = 0  #: of these, found
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def find(self, tokens: Sequence[int], namespace: bytes) -> int:
        """How many leading tokens are cached: a multiple of the block size, and never all (one has to be computed)."""
        found = 0
        for key in self._keys(tokens[:-1], namespace):
            if key not in self._blocks:
                break
            self._blocks.move_to_end(key)
            found += self.block_size
        self.queries += len(tokens)
        self.hits += found
        return found

    def store(self, tokens: Sequence[int], namespace: bytes) -> None:
        """Remember the full blocks of `tokens`."""
        for key in self._keys(tokens, namespace):
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        while len(self._blocks) > self.capacity:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        """Forget every block."""
        self._blocks.clear()

    def _keys(self, tokens: Sequence[int], namespace: bytes) -> Iterator[bytes]:
        key = blake2b(namespace, digest_size=16).digest()
        for start in range(0, len(tokens) - self.block_size + 1, self.block_size):
            key = blake2b(array("I", tokens[start : start + self.block_size]).tobytes(), key=key, digest_size=16).digest()
            yield key
