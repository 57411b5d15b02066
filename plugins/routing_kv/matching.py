"""How much of a prompt each holder has: one walk along the prompt for all of them together.

Holders are bits of one integer. At each block the walk goes on with those that have it; whoever drops out has had that many.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from plugins.routing_kv.hashing import BlockName, Prompt
from plugins.routing_kv.index import SHARDS, Holders, each_bit

#: Names are computed as far ahead.
_STRIDE: Final = 128


def depths(prompt: Prompt, tables: Sequence[Holders], bits: int) -> dict[int, int]:
    """How many of the first blocks each of these holders has, in one of the tables; nothing of those that lack the first."""
    found: dict[int, int] = {}
    if not tables:
        return found
    bits &= _having(prompt, 1, tables)
    depth, last = 1, -1
    while bits and depth < prompt.length:
        for have in _holders(prompt.reach(depth + _STRIDE)[depth:], tables):
            if have is not last:  # the index has one object for all blocks with the same holders
                last = have
                lost = bits & ~have
                bits ^= lost
                while lost:  # `each_bit`, without the generator
                    bit = lost & -lost
                    found[bit] = depth
                    lost ^= bit
                if not bits:
                    break
            depth += 1
    found.update(dict.fromkeys(each_bit(bits), depth))
    return found


def _holders(names: list[BlockName], tables: Sequence[Holders]) -> list[int]:
    """Who has each of these blocks in one of the tables."""
    first, *others = tables
    found = [first[name % SHARDS].get(name, 0) for name in names]
    for table in others:
        found = [have | table[name % SHARDS].get(name, 0) for have, name in zip(found, names, strict=True)]
    return found


def closed_depths(prompt: Prompt, tables: Sequence[Holders], bits: int) -> dict[int, int]:
    """The same where whoever has a block has all before it, too: so a few looks are enough. It is so with what was sent."""
    found: dict[int, int] = {}
    if not tables or not (bits := bits & _having(prompt, 1, tables)):
        return found

    def part(low: int, high: int, bits: int) -> None:
        """Find the depths of those that have at least `low`, and at most `high`."""
        if low == high:
            found.update(dict.fromkeys(each_bit(bits), low))
            return
        middle = (low + high + 1) // 2
        have = _having(prompt, middle, tables) & bits
        if have:
            part(middle, high, have)
        if have != bits:
            part(low, middle - 1, bits ^ have)

    low, step = 1, 1
    while bits and low < prompt.length:
        high = min(low + step, prompt.length)
        have = _having(prompt, high, tables) & bits
        if have != bits:
            part(low, high - 1, bits ^ have)
        bits, low, step = have, high, 2 * step
    found.update(dict.fromkeys(each_bit(bits), low))
    return found


def _having(prompt: Prompt, depth: int, tables: Sequence[Holders]) -> int:
    """Who has the block at this depth, counted from 1."""
    [have] = _holders(prompt.reach(depth)[depth - 1 : depth], tables) or [0]
    return have


def counts(prompt: Prompt, tables: Sequence[Holders], limits: Mapping[int, int]) -> dict[int, int]:
    """How many of its first blocks (`limits`, as `depths` has them) each holder has in one of these tables, gaps or not."""
    totals = dict.fromkeys(limits, 0)
    since: dict[int, int] = {}
    ends: dict[int, int] = {}
    alive = current = 0
    for bit, limit in limits.items():
        ends[limit] = ends.get(limit, 0) | bit
        alive |= bit
    longest = max(limits.values(), default=0)
    for depth, have in enumerate(_holders(prompt.reach(longest)[:longest], tables) if tables else [0] * longest):
        alive &= ~ends.get(depth, 0)
        present = have & alive
        if present != current:
            for bit in each_bit(present ^ current):
                if present & bit:
                    since[bit] = depth
                else:
                    totals[bit] += depth - since.pop(bit)
            current = present
    for bit, start in since.items():
        totals[bit] += limits[bit] - start
    return totals
