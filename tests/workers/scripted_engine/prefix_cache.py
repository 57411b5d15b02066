"""A prefix cache as vLLM's: full blocks, chained hashes, separated by salt, adapter and media."""

import array
import hashlib
from collections.abc import Iterator, Sequence

from tests.workers.scripted_engine.wire import CacheStats, Request


class PrefixCache:
    """The blocks whose keys and values are known, least recently used first."""

    def __init__(self, block_size: int, capacity: int) -> None:
        self._block_size = block_size
        self._capacity = capacity
        self._blocks: dict[bytes, None] = {}
        self._stats = CacheStats()

    def cached_tokens(self, request: Request) -> int:
        """How many prompt tokens a request finds in the cache: whole blocks, and never the last token."""
        hits = 0
        for block in self._hashes(request, request.prompt_token_ids[:-1]):
            if block not in self._blocks:
                break
            hits += self._block_size
        self._stats.requests += 1
        self._stats.queries += len(request.prompt_token_ids)
        self._stats.hits += hits
        return hits

    def store(self, request: Request, output: Sequence[int] = ()) -> None:
        """Remember the full blocks of a request's prompt and output."""
        for block in self._hashes(request, [*request.prompt_token_ids, *output]):
            self._blocks.pop(block, None)
            self._blocks[block] = None
        while len(self._blocks) > self._capacity:
            del self._blocks[next(iter(self._blocks))]

    def reset(self) -> None:
        """Forget everything."""
        self._blocks.clear()
        self._stats.reset = True

    def take_stats(self) -> CacheStats:
        """The counters since the last call."""
        stats, self._stats = self._stats, CacheStats()
        return stats

    def _hashes(self, request: Request, token_ids: Sequence[int]) -> Iterator[bytes]:
        media = [feature.get("identifier") for feature in request.mm_features or []]
        parent = repr((request.lora and request.lora[:3], media, request.cache_salt)).encode()
        for start in range(0, len(token_ids) - self._block_size + 1, self._block_size):
            block = array.array("I", token_ids[start : start + self._block_size])
            parent = hashlib.blake2b(parent + block.tobytes(), digest_size=16).digest()
            yield parent
