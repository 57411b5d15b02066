"""The index: which engine holds which blocks, in which medium. Exact, and small enough for millions of blocks.

A block's name leads to a set of holders, an integer with one bit for each. Each holder in turn has the engine's hashes of its blocks with
our names, because removals come by the engine's hash. Tables are cut into shards: a dict that grows copies itself, and a big one would
hold up the event loop for long.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, Literal

from plugins.routing_kv.hashing import BlockName

Medium = Literal["GPU", "CPU", "STORAGE"]
MEDIA: Final[tuple[Medium, ...]] = ("GPU", "CPU", "STORAGE")
#: A power of two.
SHARDS: Final = 64
_SHARD_MASK: Final = SHARDS - 1
_OWN_SHARDS: Final = 8
#: Sets of holders of which there is one object each; with more, those that come later have their own.
_SETS: Final = 16_384

#: Name → bits of the holders.
Holders = list[dict[BlockName, int]]


class Index:
    """All blocks of all holders; at most `most` pairs of block and holder, what comes on top isn't kept."""

    def __init__(self, most: int) -> None:
        #: Told when there is something to sweep.
        self.on_unswept: Callable[[], None] = lambda: None
        self.holders: dict[Medium, Holders] = {medium: [{} for _ in range(SHARDS)] for medium in MEDIA}
        #: Pairs of block and holder, those to sweep included, and how many were not kept.
        self.pairs = 0
        self.refused = 0
        self._most = most
        self._bits = 0
        self._free: list[int] = []
        self._sets: dict[int, int] = {}
        self._left: deque[tuple[int, dict[Medium, _Own]]] = deque()

    def holder(self) -> "Holder":
        """A new holder, without blocks."""
        return Holder(self)

    def blocks(self, medium: Medium) -> int:
        """How many different blocks somebody holds in this medium."""
        return sum(map(len, self.holders[medium]))

    @property
    def unswept(self) -> bool:
        """Whether blocks are left of holders that gave theirs up. They are nobody's, and only take memory."""
        return bool(self._left)

    def sweep(self, most: int) -> None:
        """Take away so many of the blocks that are nobody's any more."""
        while most > 0 and self._left:
            bit, media = self._left[0]
            swept = 0
            for medium, own in media.items():
                for name in own.take(most - swept):
                    self._drop(medium, name, bit)
                    swept += 1
            self.pairs -= swept
            most -= swept
            if not any(own.names for own in media.values()):
                self._left.popleft()
                self._give_back(bit)

    def _take_bit(self) -> int:
        if self._free:
            return self._free.pop()
        self._bits += 1
        return 1 << (self._bits - 1)

    def _give_back(self, bit: int) -> None:
        if bit:
            self._free.append(bit)

    def _full(self) -> bool:
        if self.pairs < self._most:
            return False
        self.refused += 1
        return True

    def _leave(self, bit: int, media: "dict[Medium, _Own]") -> None:
        self._left.append((bit, media))
        self.on_unswept()

    def _one(self, bits: int) -> int:
        """The one object for these holders: most blocks that several have follow one another, and share it."""
        if len(self._sets) >= _SETS:
            self._sets.clear()
        return self._sets.setdefault(bits, bits)

    def _drop(self, medium: Medium, name: BlockName, bit: int) -> None:
        shard = self.holders[medium][name & _SHARD_MASK]
        if rest := shard.get(name, 0) & ~bit:
            shard[name] = self._one(rest)
        else:
            shard.pop(name, None)


class Holder:
    """The blocks of one engine. `bit` stands for it in the index; it is another one after each `clear`."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._media: dict[Medium, _Own] = {}
        self.bit = index._take_bit()

    def blocks(self, medium: Medium) -> int:
        """How many it holds there; copies of one count once."""
        own = self._media.get(medium)
        return own.names if own else 0

    def find(self, engine_hash: int) -> BlockName | None:
        """Our name of a block that it holds anywhere."""
        for own in self._media.values():
            name = own.shards[engine_hash % _OWN_SHARDS].get(engine_hash)
            if name is not None:
                return name
        return None

    def store(self, medium: Medium, engine_hash: int, name: BlockName) -> None:
        """It holds the block, or one more copy of it (vLLM 0.31: computed twice, a block is kept twice, and removed twice)."""
        if not self.bit:
            return
        own = self._media.get(medium)
        if own is None:
            own = self._media[medium] = _Own()
        known = own.shards[engine_hash % _OWN_SHARDS]
        if engine_hash in known:
            own.copies[engine_hash] = own.copies.get(engine_hash, 0) + 1
            return
        if self._index._full():
            return
        shard = self._index.holders[medium][name & _SHARD_MASK]
        bits = shard.get(name, 0)
        if bits & self.bit:  # under another of the engine's hashes: of an adapter that was loaded again from elsewhere, say
            own.aliases[name] = own.aliases.get(name, 0) + 1
        else:
            shard[name] = self._index._one(bits | self.bit) if bits else self.bit
        known[engine_hash] = name
        own.names += 1
        self._index.pairs += 1

    def remove(self, medium: Medium, engine_hash: int) -> None:
        """One copy of the block is gone; nothing happens when it wasn't known."""
        own = self._media.get(medium)
        if own is None:
            return
        if engine_hash in own.copies:
            _count_down(own.copies, engine_hash)
            return
        name = own.shards[engine_hash % _OWN_SHARDS].pop(engine_hash, None)
        if name is None:
            return
        own.names -= 1
        self._index.pairs -= 1
        if name in own.aliases:
            _count_down(own.aliases, name)
        else:
            self._index._drop(medium, name, self.bit)

    def clear(self) -> None:
        """It holds nothing any more. Takes no time: the blocks are swept away later."""
        if self.bit:
            self._index._leave(self.bit, self._media)
            self.bit = self._index._take_bit()
            self._media = {}

    def close(self) -> None:
        """It's no holder any more, and what it's told from now on is ignored."""
        self.clear()
        self._index._give_back(self.bit)
        self.bit = 0


class _Own:
    """One holder's blocks in one medium, by the engine's hash."""

    __slots__ = ("aliases", "copies", "names", "shards")

    def __init__(self) -> None:
        self.shards: list[dict[int, BlockName]] = [{} for _ in range(_OWN_SHARDS)]
        self.names = 0
        #: Further copies under the same hash, and further hashes of the same name; rare.
        self.copies: dict[int, int] = {}
        self.aliases: dict[BlockName, int] = {}

    def take(self, most: int) -> Iterator[BlockName]:
        """Take out so many names, for good."""
        for shard in self.shards:
            while shard and most > 0:
                most -= 1
                self.names -= 1
                yield shard.popitem()[1]


def _count_down(counts: dict[int, int], key: int) -> None:
    if counts[key] > 1:
        counts[key] -= 1
    else:
        del counts[key]


def each_bit(bits: int) -> Iterator[int]:
    """The bits that are set, each as a number with one bit."""
    while bits:
        bit = bits & -bits
        yield bit
        bits ^= bit
