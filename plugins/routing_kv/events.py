"""KV events as vLLM's engines publish them, decoded: which blocks an engine has now, and no longer.

Two forms are about: since June 2026 each event is a map (vLLM 0.31 to 0.33), before it was an array. Fields that nobody uses here may come
and go; the others must have their types, or the event is left out and counted.
"""

from typing import Any, Final

import msgspec
from msgspec import Raw, Struct, field

#: An unsigned 64-bit number, the last eight bytes of a digest; or the digest itself (`VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0`).
EngineHash = int | bytes

_64_BITS: Final = 2**64 - 1
#: What can't be decoded; msgspec doesn't count too deep a nesting among its own errors.
_UNREADABLE: Final = (msgspec.MsgspecError, RecursionError)


class Stored(Struct, frozen=True, gc=False, tag="BlockStored", tag_field="type"):
    """Blocks that follow one another have been cached. `token_ids` are those of all blocks; none come with a copy in another medium."""

    block_hashes: list[EngineHash]
    token_ids: list[int]
    block_size: int
    #: The block before the first; `None` at the start of a prompt.
    parent_block_hash: EngineHash | None = None
    medium: str | None = None
    lora_name: str | None = None
    #: For each block what makes it differ beside its tokens: the adapter's name, `[identifier, offset]` of media, the salt.
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    locality: str | None = None


class Removed(Struct, frozen=True, gc=False, tag="BlockRemoved", tag_field="type"):
    """Blocks are no longer cached, one copy of each."""

    block_hashes: list[EngineHash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class Cleared(Struct, frozen=True, gc=False, tag="AllBlocksCleared", tag_field="type"):
    """The engine's prefix cache is empty."""


Event = Stored | Removed | Cleared


class Batch(Struct, frozen=True):
    """What one message said; `malformed` counts the events in it that can't be read."""

    events: list[Event] = field(default_factory=list[Event])
    malformed: int = 0


class _Maps(Struct, array_like=True, gc=False):
    ts: Any
    events: list[Event]


class _Unread(Struct, array_like=True, gc=False):
    ts: Any
    events: list[Raw]


class _StoredArray(Struct, array_like=True, gc=False, tag="BlockStored"):
    block_hashes: list[EngineHash]
    parent_block_hash: EngineHash | None
    token_ids: list[int]
    block_size: int
    lora_id: Any = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    sliding_window: Any = None
    locality: str | None = None


class _RemovedArray(Struct, array_like=True, gc=False, tag="BlockRemoved"):
    block_hashes: list[EngineHash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class _ClearedArray(Struct, array_like=True, gc=False, tag="AllBlocksCleared"):
    pass


_maps: Final = msgspec.msgpack.Decoder(_Maps)
_unread: Final = msgspec.msgpack.Decoder(_Unread)
_map: Final = msgspec.msgpack.Decoder(Event)
_array: Final = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray)


def decode(payload: bytes) -> Batch:
    """The events of one message, in their order: MessagePack of `[time, [event, …], data-parallel rank]`."""
    try:
        return Batch(_maps.decode(payload).events)
    except _UNREADABLE:
        return _decode_one_by_one(payload)


def key_of(engine_hash: EngineHash) -> int:
    """A hash as a number, whatever its form; some publishers write it as signed."""
    if isinstance(engine_hash, int):
        return engine_hash & _64_BITS
    return int.from_bytes(engine_hash[-8:], "big")


def _decode_one_by_one(payload: bytes) -> Batch:
    try:
        unread = _unread.decode(payload).events
    except _UNREADABLE:
        return Batch(malformed=1)
    events: list[Event] = []
    malformed = 0
    for raw in unread:
        try:
            events.append(_decode_one(raw))
        except _UNREADABLE:
            malformed += 1
    return Batch(events, malformed)


def _decode_one(raw: Raw) -> Event:
    try:
        return _map.decode(raw)
    except msgspec.ValidationError:
        found = _array.decode(raw)
    if isinstance(found, _ClearedArray):
        return Cleared()
    if isinstance(found, _RemovedArray):
        return Removed(found.block_hashes, found.medium, found.group_idx, found.locality)
    return Stored(
        found.block_hashes,
        found.token_ids,
        found.block_size,
        found.parent_block_hash,
        found.medium,
        found.lora_name,
        found.extra_keys,
        found.group_idx,
        found.kv_cache_spec_kind,
        found.locality,
    )
