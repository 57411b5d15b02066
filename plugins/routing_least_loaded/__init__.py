"""Least loaded: the worker with the fewest tokens in flight.

A prompt of 30,000 tokens and one of 30 are two requests, and not the same load. What counts is what fills a worker's KV cache: the
prompts of the calls that are there, and the outputs that they are expected to have.
"""

from collections.abc import Sequence
from random import Random
from typing import Annotated

from msgspec import Meta

from core import Call, Choice, PluginSettings, Worker, hookimpl, ranks_for
from plugins.routing_least_loaded.tokens import ExpectedTokens

#: Of more workers, two are drawn and the less loaded one is taken: nearly as even, and it costs the same for any number.
COMPARED = 32
#: A worker's id, and a data-parallel rank where it has several.
Slot = tuple[str, int | None]


class Settings(PluginSettings, frozen=True):
    """`[plugins.least-loaded]`."""

    #: How many output tokens a call is expected to have before any has ended; then it is the mean of those that have.
    output_tokens: Annotated[int, Meta(ge=0)] = 512


class LeastLoaded:
    """Counts each attempt's tokens from its start to its end, whichever policy has chosen the worker."""

    settings_type = Settings

    def __init__(self, settings: Settings) -> None:
        self._expected = ExpectedTokens(settings.output_tokens)
        #: Tokens in flight. Nothing is kept of where there are none.
        self._load: dict[Slot, int] = {}
        #: What was counted for the attempt of a call, by the call's identity: calls may share an id, and one has one attempt at a time.
        self._counted: dict[int, tuple[Slot, int]] = {}
        self._random = Random()  # noqa: S311 - nobody gains by guessing it

    @hookimpl
    def choose_worker(self, call: Call, workers: Sequence[Worker]) -> Choice:
        """See `core.hookspecs`."""
        candidates = self._random.sample(workers, 2) if len(workers) > COMPARED else workers
        slots = [(worker, rank) for worker in candidates for rank in ranks_for(call, worker)]
        loads = [self.load(worker, rank) for worker, rank in slots]
        least = min(loads)
        # By lot, so that of idle workers not always the first one gets the next call.
        worker, rank = self._random.choice([slot for slot, load in zip(slots, loads, strict=True) if load == least])
        where = "" if rank is None else f" on rank {rank}"
        return Choice(worker, f"least-loaded: {least:,} tokens in flight{where}", rank)

    @hookimpl
    def attempt_started(self, call: Call, choice: Choice) -> None:
        """See `core.hookspecs`."""
        slot, tokens = (choice.worker.id, choice.rank), self._expected.of(call)
        self._counted[id(call)] = slot, tokens
        self._load[slot] = self._load.get(slot, 0) + tokens

    @hookimpl
    def attempt_ended(self, call: Call, output_tokens: int) -> None:
        """See `core.hookspecs`."""
        slot, tokens = self._counted.pop(id(call))
        left = self._load.pop(slot) - tokens
        if left:
            self._load[slot] = left
        self._expected.learn(call, output_tokens)

    def load(self, worker: Worker, rank: int | None) -> int:
        """The tokens in flight on a worker's rank. Calls that were left to the worker are taken for spread over all its ranks."""
        load = self._load.get((worker.id, rank), 0)
        if rank is not None and worker.info and (spread := self._load.get((worker.id, None))):
            load += spread // len(worker.info.ranks)
        return load
