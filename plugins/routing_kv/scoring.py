"""Which place is the best for a call: where most of its prompt is cached, unless too much is to be done there already.

The cost of a place, in tokens, is what it would have to compute of the prompt, plus `load` times its work: what it has to compute for
others, and has computed lately. A block in the engine's own memory saves all of its tokens, one that has to be fetched a part of them.
"""

import functools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from core import Call
from plugins.routing_kv.hashing import Prompt
from plugins.routing_kv.matching import closed_depths, counts, depths
from plugins.routing_kv.places import Caches, Place

_NOTHING: Final[Mapping[int, int]] = {}


class Weights(NamedTuple):
    """How many tokens a token in flight, a cached one in CPU memory, and one in storage are worth."""

    load: float
    cpu: float
    storage: float


class Match(NamedTuple):
    """How much of a call's prompt a place has."""

    place: Place
    prompt: Prompt
    #: Leading full blocks that it has, or will have soon.
    blocks: int
    #: Whether that is a guess: its events don't say so, or not yet.
    guessed: bool
    #: What is left to compute, in tokens.
    tokens: float


class Scorer:
    """Compares places."""

    def __init__(self, caches: Caches, weights: Weights) -> None:
        self._caches = caches
        self._weights = weights

    def best(self, call: Call, places: Sequence[Place]) -> Match:
        """The place of the least cost; of equal ones the least loaded, then the first."""
        ranked = (self._best(call, prompt, group) for prompt, group in _named_alike(call, places))
        return min(ranked, key=_rank)[0]

    def _best(self, call: Call, prompt: Prompt, places: Sequence[Place]) -> tuple[Match, tuple[float, float, int]]:
        cached, saved = self._cached(prompt, places)
        soon = believed = _NOTHING
        if tables := self._caches.soon.tables():
            soon = closed_depths(prompt, tables, _together(place.soon_bit for place in places))
        if tables := self._caches.believed.tables():
            believed = closed_depths(prompt, tables, _together(place.believed_bit for place in places))
        # Of those that have nothing of it, only the least loaded can be the best.
        candidates = [min(places, key=_work)]
        if cached or soon or believed:
            candidates += [p for p in places if p.feed.holder.bit in cached or p.soon_bit in soon or p.believed_bit in believed]
        length, size, weight = len(call.token_ids), prompt.block_size, self._weights.load
        least = math.inf, 0.0, 0
        best = candidates[0], 0, False, 0.0
        for place in candidates:
            bit = place.feed.holder.bit
            blocks = cached.get(bit, 0)
            guess = max(soon.get(place.soon_bit, 0), believed.get(place.believed_bit, 0))
            left = length - size * (guess if guess > blocks else saved.get(bit, 0))
            cost = left + weight * place.work
            if cost <= least[0] and (rank := (cost, place.work, place.calls)) < least:
                least, best = rank, (place, max(blocks, guess), guess > blocks, left)
        place, blocks, guessed, left = best
        return Match(place, prompt, blocks, guessed, left), least

    def _cached(self, prompt: Prompt, places: Sequence[Place]) -> tuple[dict[int, int], dict[int, float] | dict[int, int]]:
        """By holder: the leading blocks that it has in any medium, and how many blocks' tokens that saves."""
        holders = {medium: tables for medium, tables in self._caches.index.holders.items() if any(tables)}
        cached = depths(prompt, list(holders.values()), _together(place.feed.holder.bit for place in places))
        if not cached or not holders.keys() - {"GPU"}:
            return cached, cached
        in_gpu = counts(prompt, [tables for medium, tables in holders.items() if medium == "GPU"], cached)
        in_memory = counts(prompt, [tables for medium, tables in holders.items() if medium != "STORAGE"], cached)
        _, cpu, storage = self._weights
        saved = {bit: in_gpu[bit] + cpu * (in_memory[bit] - in_gpu[bit]) + storage * (cached[bit] - in_memory[bit]) for bit in cached}
        return cached, saved


def _named_alike(call: Call, places: Sequence[Place]) -> Iterator[tuple[Prompt, Sequence[Place]]]:
    """The places, together as they have the same names for the call's blocks: by their block sizes, and the call's salt there."""
    identity = call.identity
    sizes = {place.block_size for place in places}
    if len(sizes) == 1 and identity.per_worker is None:
        yield Prompt(call, sizes.pop(), identity.namespace), places
        return
    groups: dict[tuple[int, str], list[Place]] = {}
    for place in places:
        groups.setdefault((place.block_size, identity.namespace_on(place.worker)), []).append(place)
    for (size, namespace), group in groups.items():
        yield Prompt(call, size, namespace), group


def _rank(one: tuple[Match, tuple[float, float, int]]) -> tuple[float, float, int]:
    return one[1]


def _work(place: Place) -> tuple[float, int]:
    return place.work, place.calls


def _together(bits: Iterable[int]) -> int:
    return functools.reduce(operator.or_, bits)
