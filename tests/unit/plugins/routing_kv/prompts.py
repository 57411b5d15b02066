"""Calls, and the events of an engine that has them in its cache."""

from collections.abc import Sequence
from typing import Any

from core import Call, Identity, SamplingParams
from plugins.routing_kv.events import EngineHash, Stored

BLOCK = 4


def call_of(
    token_ids: Sequence[int], *, salt: str = "", adapter: str = "", media: Sequence[tuple[str, int, int]] = (), **more: Any
) -> Call:
    """A call as it is when a worker is chosen; `media` are identifiers with their offsets and lengths."""
    identity = Identity(salt, adapter, tuple(medium for medium, *_ in media), tuple((offset, length) for _, offset, length in media))
    return Call(id="c", token_ids=list(token_ids), sampling=SamplingParams(max_tokens=8), identity=identity, **more)


def stored(
    token_ids: Sequence[int],
    *,
    first_hash: int = 100,
    parent: int | None = None,
    salt: str = "",
    adapter: str = "",
    media: Sequence[tuple[str, int, int]] = (),
    offset: int = 0,
    block_size: int = BLOCK,
    **more: Any,
) -> Stored:
    """What an engine says when it has cached these tokens, which begin at `offset` of their prompt; hashes count from `first_hash`."""
    count = len(token_ids) // block_size
    keys: list[list[Any] | None] = []
    for index in range(count):
        start = offset + index * block_size
        own: list[Any] = [adapter] if adapter else []
        own += [[medium, at - start] for medium, at, length in media if at < start + block_size and at + length > start]
        own += [salt] if salt and start == 0 else []
        keys.append(own or None)
    hashes: list[EngineHash] = list(range(first_hash, first_hash + count))
    fields = {"parent_block_hash": parent, "lora_name": adapter or None, "extra_keys": keys, "medium": "GPU", "group_idx": 0}
    return Stored(hashes, list(token_ids[: count * block_size]), block_size, **fields | more)
