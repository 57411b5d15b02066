"""Which blocks of tokens an engine would have in its KV cache. Only the keys: there is nothing to store."""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import groupby
from typing import Any

from plugins.stand_in.engine.adapters import Adapter
from plugins.stand_in.engine.call import Medium

#: An event as vLLM publishes it, but for MessagePack.
KVEvent = dict[str, Any]


@dataclass(frozen=True)
class Namespace:
    """What must be equal for two calls to share KV blocks, beside their tokens."""

    salt: str = ""
    adapter: Adapter | None = None
    media: Sequence[Medium] = ()

    @property
    def key(self) -> bytes:
        """Stands for it in the first block's key."""
        namespace = self.salt.encode() + b"\0\0" + (self.adapter.namespace if self.adapter else b"")
        return blake2b(namespace, digest_size=16).digest()

    def seen(self, start: int, end: int) -> list[list[Any]]:
        """The media of a block, and where they begin, seen from there (vLLM 0.33: before it, below zero)."""
        return [[name, offset - start] for name, offset, length in self.media if offset < end and offset + length > start]


class PrefixCache:
    """Full blocks of `block_size` tokens, found again under the same salt and adapter; at most `capacity` of them.

    The least recently used block goes first. What comes and goes is told to `announce`, if there is one.
    """

    def __init__(self, block_size: int, capacity: int) -> None:
        self.block_size = block_size
        self.capacity = capacity
        self.queries = 0  #: prompt tokens that were looked up
        self.hits = 0  #: of these, found
        self.announce: Callable[[Sequence[KVEvent]], None] | None = None
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def find(self, tokens: Sequence[int], namespace: Namespace) -> int:
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

    def store(self, tokens: Sequence[int], namespace: Namespace) -> None:
        """Remember the full blocks of `tokens`."""
        keys = list(self._keys(tokens, namespace))
        events = list(self._stored(tokens, keys, namespace)) if self.announce else []
        for key in keys:
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        while len(self._blocks) > self.capacity:
            key, _ = self._blocks.popitem(last=False)
            events.append({"type": "BlockRemoved", "block_hashes": [_hash(key)], "medium": "GPU", "group_idx": 0})
        if self.announce and events:
            self.announce(events)

    def clear(self) -> None:
        """Forget every block."""
        self._blocks.clear()
        if self.announce:
            self.announce([{"type": "AllBlocksCleared"}])

    def _keys(self, tokens: Sequence[int], namespace: Namespace) -> Iterator[bytes]:
        key = namespace.key
        for start in range(0, len(tokens) - self.block_size + 1, self.block_size):
            end = start + self.block_size
            block = array("I", tokens[start:end]).tobytes()
            if media := namespace.seen(start, end):
                block += repr(media).encode()
            key = blake2b(block, key=key, digest_size=16).digest()
            yield key

    def _stored(self, tokens: Sequence[int], keys: Sequence[bytes], namespace: Namespace) -> Iterator[KVEvent]:
        """One event for each run of blocks that are new."""
        adapter = namespace.adapter
        for known, run in groupby(range(len(keys)), lambda index: keys[index] in self._blocks):
            if known:
                continue
            indices = list(run)
            first, end = indices[0], indices[-1] + 1
            extra_keys = [self._extra_keys(index, namespace) for index in indices]
            yield {
                "type": "BlockStored",
                "block_hashes": [_hash(key) for key in keys[first:end]],
                "parent_block_hash": _hash(keys[first - 1]) if first else None,
                "token_ids": list(tokens[first * self.block_size : end * self.block_size]),
                "block_size": self.block_size,
                "lora_id": adapter.id if adapter else None,
                "medium": "GPU",
                "lora_name": adapter.name if adapter else None,
                "extra_keys": extra_keys,
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            }

    def _extra_keys(self, block: int, namespace: Namespace) -> list[Any] | None:
        """What a block's hash was made of beside its tokens, in vLLM's order."""
        adapter: list[Any] = [namespace.adapter.name] if namespace.adapter else []
        salt = [namespace.salt] if block == 0 and namespace.salt else []
        start = block * self.block_size
        return [*adapter, *namespace.seen(start, start + self.block_size), *salt] or None


def _hash(key: bytes) -> int:
    """As vLLM shortens its digests for events."""
    return int.from_bytes(key[-8:], "big")
