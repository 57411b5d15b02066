"""A prefix cache as vLLM's: full blocks, chained hashes, separated by salt, adapter and media."""

import array
import hashlib
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

from tests.workers.scripted_engine.wire import CacheStats, Request


class PrefixCache:
    """The blocks whose keys and values are known, least recently used first."""

    def __init__(self, block_size: int, capacity: int) -> None:
        self._block_size = block_size
        self._capacity = capacity
        self._blocks: dict[bytes, None] = {}
        self._stats = CacheStats()
        #: Told of what comes and goes, as vLLM's KV events have it.
        self.announce: Callable[[list[dict[str, Any]]], None] | None = None

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
        token_ids = [*request.prompt_token_ids, *output]
        blocks = list(self._hashes(request, token_ids))
        events = list(self._stored(request, token_ids, blocks)) if self.announce else []
        for block in blocks:
            self._blocks.pop(block, None)
            self._blocks[block] = None
        while len(self._blocks) > self._capacity:
            evicted = next(iter(self._blocks))
            del self._blocks[evicted]
            events.append({"type": "BlockRemoved", "block_hashes": [_number(evicted)], "medium": "GPU", "group_idx": 0})
        if self.announce and events:
            self.announce(events)

    def reset(self) -> None:
        """Forget everything."""
        self._blocks.clear()
        self._stats.reset = True
        if self.announce:
            self.announce([{"type": "AllBlocksCleared"}])

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

    def _stored(self, request: Request, token_ids: Sequence[int], blocks: Sequence[bytes]) -> Iterator[dict[str, Any]]:
        """One event for each run of blocks that are new. Media aren't told."""
        name, number = request.lora[:2] if request.lora else (None, None)
        for known, run in groupby(range(len(blocks)), lambda index: blocks[index] in self._blocks):
            if known:
                continue
            indices = list(run)
            first, end = indices[0], indices[-1] + 1
            salts = [[request.cache_salt] if index == 0 and request.cache_salt else [] for index in indices]
            yield {
                "type": "BlockStored",
                "block_hashes": [_number(block) for block in blocks[first:end]],
                "parent_block_hash": _number(blocks[first - 1]) if first else None,
                "token_ids": list(token_ids[first * self._block_size : end * self._block_size]),
                "block_size": self._block_size,
                "lora_id": number,
                "medium": "GPU",
                "lora_name": name,
                "extra_keys": [([name] if name else []) + salt or None for salt in salts],
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            }


def _number(block: bytes) -> int:
    return int.from_bytes(block[-8:], "big")
