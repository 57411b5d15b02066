"""The places where a call can go: a worker, or one of its data-parallel ranks, with what is known of its cache and of its load."""

import math
from collections.abc import Callable, Iterator
from typing import Final

from core import Worker
from plugins.routing_kv.feed import Feed
from plugins.routing_kv.index import Index
from plugins.routing_kv.predictions import Predictions

#: So long a prompt counts as being on its way to an engine that tells what it has; it does so within moments.
_SOON_SECONDS: Final = 5.0
#: What was sent takes as many blocks as the index at most, divided by this.
_GUESSED: Final = 8


class Place:
    """One engine."""

    def __init__(self, worker: Worker, rank: int | None, cache: "Caches", block_size: int) -> None:
        self.worker = worker
        #: `None` for a worker that has only one.
        self.rank = rank
        self.feed = Feed(cache.index.holder())
        self.soon_bit = cache.soon.take_bit()
        self.believed_bit = cache.believed.take_bit()
        #: Tokens that the calls which are there make it compute, and how many calls these are.
        self.load = 0
        self.calls = 0
        self._ended = 0
        #: What the calls that have ended lately made it compute, less of it as time goes by. Sessions that were here come back.
        self.recent = 0.0
        self._cache = cache
        self._block_size = block_size
        self._version = worker.policy_version

    @property
    def work(self) -> float:
        """What it has to compute for the calls that are there, and for those that are taken to follow, in tokens."""
        return self.load + self.recent

    @property
    def block_size(self) -> int:
        """In tokens: as its events have it, else as its worker says, else as the settings do."""
        return self.feed.block_size or (self.worker.info.kv_block_size if self.worker.info else 0) or self._block_size

    def ended(self) -> int:
        """How many calls have left it."""
        return self._ended

    def begin_call(self, tokens: int) -> None:
        """A call has come, for which it is expected to compute so many tokens."""
        self.load += tokens
        self.calls += 1

    def end_call(self, tokens: int, computed: int) -> None:
        """The call has left it; what it has computed for it in the end."""
        self.load -= tokens
        self.recent += computed
        self.calls -= 1
        self._ended += 1

    def renew(self) -> None:
        """Believe nothing any more when its weights have changed, since that empties its cache. Its events tell that by themselves."""
        if self.worker.policy_version != self._version:
            self._version = self.worker.policy_version
            self._cache.believed.give_back(self.believed_bit)
            self.believed_bit = self._cache.believed.take_bit()

    def close(self) -> None:
        """It is gone."""
        self.feed.holder.close()
        self._cache.soon.give_back(self.soon_bit)
        self._cache.believed.give_back(self.believed_bit)


class Caches:
    """What all places have: by their events, soon, and as is believed of those that don't tell."""

    def __init__(self, *, most: int, believe_seconds: float, clock: Callable[[], float]) -> None:
        self.index = Index(most)
        self.soon = Predictions(_SOON_SECONDS, most // _GUESSED, clock)
        self.believed = Predictions(believe_seconds, most // _GUESSED, clock)


class Places:
    """All places, by worker. `recent_seconds` is how long it takes until half of what was computed lately is forgotten."""

    def __init__(self, caches: Caches, *, block_size: int, recent_seconds: float, clock: Callable[[], float]) -> None:
        self._caches = caches
        self._recent_seconds = recent_seconds
        self._clock = clock
        self._cooled = -math.inf
        self._block_size = block_size
        self._by_worker: dict[Worker, tuple[Place, ...]] = {}

    def of(self, worker: Worker) -> tuple[Place, ...]:
        """Those of a worker, at least one."""
        places = self._by_worker.get(worker)
        if places is None:
            ranks = worker.info.ranks if worker.info and len(worker.info.ranks) > 1 else (None,)
            places = tuple(Place(worker, rank, self._caches, self._block_size) for rank in ranks)
            self._by_worker[worker] = places
        return places

    def at(self, worker: Worker, rank: int | None) -> Place:
        """The place of a worker's rank; the first one of the worker when it has no such rank, or its own choice was left to it."""
        places = self.of(worker)
        return next((place for place in places if place.rank == rank), places[0])

    def forget(self, worker: Worker) -> tuple[Place, ...]:
        """The worker is gone, and its cache with it; returns the places that it had."""
        places = self._by_worker.pop(worker, ())
        for place in places:
            place.close()
        return places

    def cool(self) -> None:
        """Let time go by, in steps of a second at least."""
        now = self._clock()
        if (passed := now - self._cooled) < 1:
            return
        self._cooled = now
        left = 0.5 ** (passed / self._recent_seconds)
        for place in self:
            place.recent *= left

    def __iter__(self) -> Iterator[Place]:
        for places in self._by_worker.values():
            yield from places
