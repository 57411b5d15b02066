"""A worker model: an engine that takes time and keeps a prefix cache, and computes nothing.

Calls wait in line for a place in the batch, then for the prefill, which serves one prompt at a time; what the cache holds costs nothing.
All calls of the batch decode together, each more slowly the more there are. Blocks are evicted by least recent use, pinned by nobody.
"""

from collections import OrderedDict
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from heapq import heappop, heappush
from itertools import count
from typing import Any

import trio
from msgspec import Struct

from core.call import Call
from core.reply import ChunkChoice, Output
from core.simulation.trace import BLOCK_SIZE, Turn
from core.wire.lane import OutputStream
from core.wire.needs import GRPC_CAN, Wire


class EngineModel(Struct, frozen=True, kw_only=True):
    """How fast and how large each engine is."""

    prefill_tokens_per_second: float = 20_000.0
    #: For one output token of a call that is alone, and what each other call of the batch adds.
    decode_seconds: float = 0.01
    decode_seconds_per_call: float = 0.0001
    max_running: int = 256
    #: Blocks of the prefix cache.
    kv_blocks: int = 32_768
    block_size: int = BLOCK_SIZE


class Timing(Struct):
    """What became of one call, in seconds of the virtual clock."""

    arrived: float
    prefilled: float = 0.0
    first_token: float = 0.0
    ended: float = 0.0
    cached_tokens: int = 0
    worker: str = ""


#: Under which a call carries its `Turn` and its `Timing`.
NOTE = "simulation"


class SimulatedEngine:
    """`core.wire.lane.Lane` of one worker. `run` must be running."""

    wire: Wire = "grpc"
    can = GRPC_CAN

    def __init__(self, worker: str, model: EngineModel) -> None:
        self.worker = worker
        self.cache = PrefixCache(model.kv_blocks)
        #: Tokens that were prefilled or decoded, so not those from the cache.
        self.computed_tokens = 0
        self._model = model
        self._places = trio.Semaphore(model.max_running)
        self._prefill = trio.StrictFIFOLock()
        self._decoding = Decoding(model)

    async def run(self) -> None:
        """Decode. Cancellation ends it."""
        await self._decoding.run()

    def at_rank(self, rank: int) -> "SimulatedEngine":  # noqa: ARG002 - of the protocol
        """Simulated workers have one rank."""
        return self

    def lower(self, call: Call, index: int) -> tuple[Turn, Timing]:  # noqa: ARG002 - of the protocol
        """What the simulation knows of the call."""
        return call.notes[NOTE]

    async def generate(self, call: Call, request: Any, index: int) -> Output:  # noqa: ARG002 - of the protocol
        """Take the time that the call would take. Cancellation: it leaves the batch."""
        turn, timing = request
        async with self._places:
            async with self._prefill:
                timing.prefilled = trio.current_time()
                cached = min(self.cache.cached(turn.blocks, turn.salt) * self._model.block_size, turn.prompt_tokens)
                fresh = turn.prompt_tokens - cached
                await trio.sleep(fresh / self._model.prefill_tokens_per_second)
                self.cache.store(turn.blocks, turn.salt)
            timing.worker, timing.cached_tokens, timing.first_token = self.worker, cached, trio.current_time()
            await self._decoding.decode(turn.output_tokens)
            self.cache.store(turn.output_blocks, turn.salt)
        timing.ended = trio.current_time()
        self.computed_tokens += fresh + turn.output_tokens
        choice = ChunkChoice(index=0, token_ids=[], finish_reason="length")
        return Output(choice=choice, prompt_tokens=turn.prompt_tokens, cached_tokens=cached, completion_tokens=turn.output_tokens)

    def stream(self, call: Call, request: Any, index: int) -> AbstractAsyncContextManager[OutputStream]:
        """Simulated calls are unary."""
        raise NotImplementedError


class PrefixCache:
    """Which blocks an engine holds; the least recently used ones go first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def cached(self, blocks: Sequence[int], salt: str) -> int:
        """How many of these, from the first on, are there."""
        mask, held = hash(salt), self._blocks
        return next((n for n, block in enumerate(blocks) if block ^ mask not in held), len(blocks))

    def store(self, blocks: Sequence[int], salt: str) -> None:
        """Have been used, just now."""
        mask, held = hash(salt), self._blocks
        # The first block of a prompt is worth the most: it goes last.
        for block in reversed(blocks):
            held[block ^ mask] = None
            held.move_to_end(block ^ mask)
        while len(held) > self._capacity:
            held.popitem(last=False)


class Decoding:
    """The calls of a batch, which all go on at one speed: tokens per second, by how many they are."""

    def __init__(self, model: EngineModel) -> None:
        self._model = model
        #: By the progress at which each is done.
        self._calls: list[tuple[float, int, trio.Event]] = []
        self._order = count()
        #: Tokens that a call would have, had it been there from the beginning; and when that was so.
        self._progress = 0.0
        self._at = 0.0
        self._changed = trio.Event()

    async def decode(self, tokens: int) -> None:
        """Wait for so many tokens. Cancellation: its place in the batch is taken to the end all the same."""
        self._advance()
        done = trio.Event()
        heappush(self._calls, (self._progress + tokens, next(self._order), done))
        self._changed.set()
        await done.wait()

    async def run(self) -> None:
        """Let the calls go on. Cancellation ends it."""
        while True:
            self._advance()
            while self._calls and self._calls[0][0] <= self._progress + 1e-6:
                heappop(self._calls)[2].set()
            self._changed = trio.Event()
            with trio.move_on_after(self._left()):
                await self._changed.wait()

    def _left(self) -> float:
        return (self._calls[0][0] - self._progress) * self._seconds_per_token() if self._calls else float("inf")

    def _advance(self) -> None:
        now = trio.current_time()
        if self._calls:
            self._progress += (now - self._at) / self._seconds_per_token()
        self._at = now

    def _seconds_per_token(self) -> float:
        return self._model.decode_seconds + self._model.decode_seconds_per_call * (len(self._calls) - 1)
