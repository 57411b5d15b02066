"""What workers will have soon, or are believed to have: the prompts that were sent to them lately.

An engine announces blocks only when it has computed them, and some engines announce nothing. Blocks that were sent are remembered in
generations: the young one takes what comes, and becomes the old one after a while, when the old one is forgotten as a whole.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable

from plugins.routing_kv.hashing import BlockName
from plugins.routing_kv.index import SHARDS, Holders


class Predictions:
    """Remembers for `seconds` to twice that; at most `most` blocks, then for less. Workers are bits here, too, but not the index's."""

    def __init__(self, seconds: float, most: int, clock: Callable[[], float]) -> None:
        self._seconds = seconds
        self._most = max(most // 2, 1)
        self._clock = clock
        self._young, self._old = _empty(), _empty()
        self._count = self._old_count = 0
        self._ends = -math.inf  # no clock runs yet
        self._bits = 0
        self._given_back: deque[tuple[float, int]] = deque()

    def take_bit(self) -> int:
        """A bit for a worker of which nothing is remembered."""
        if self._given_back and self._given_back[0][0] <= self._clock():
            return self._given_back.popleft()[1]
        self._bits += 1
        return 1 << (self._bits - 1)

    def give_back(self, bit: int) -> None:
        """Nobody asks for the bit any more. It's used again once nothing is remembered under it."""
        self._given_back.append((self._clock() + 2 * self._seconds, bit))

    def note(self, names: Iterable[BlockName], bit: int) -> None:
        """Blocks were sent to a worker."""
        self._turn()
        young = self._young
        for name in names:
            shard = young[name % SHARDS]
            bits = shard.get(name)
            if bits is None:
                self._count += 1
                shard[name] = bit
            elif not bits & bit:
                shard[name] = bits | bit
        if self._count >= self._most:
            self._age()

    def tables(self) -> list[Holders]:
        """Where to look; empty when nothing is remembered."""
        self._turn()
        return [table for table, count in ((self._young, self._count), (self._old, self._old_count)) if count]

    def __len__(self) -> int:
        return self._count + self._old_count

    def _turn(self) -> None:
        late = self._clock() - self._ends
        if late < 0:
            return
        self._age()
        if late >= self._seconds:
            self._age()

    def _age(self) -> None:
        self._old, self._old_count = self._young, self._count
        self._young, self._count = _empty(), 0
        self._ends = self._clock() + self._seconds


def _empty() -> Holders:
    return [{} for _ in range(SHARDS)]
