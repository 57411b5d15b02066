"""Block hashes as vLLM's engines compute them under `--prefix-caching-hash-algo sha256_cbor`, for whoever wants to talk of blocks by these.

The index doesn't need them, it goes by what engines tell: they take many times as long as our own names, and a part of them, the path of
an adapter, isn't told. Engines of the default algorithm hash Python's pickle, which can't be had outside of their process.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Final

#: vLLM 0.31: what the first block has for its parent, unless PYTHONHASHSEED is set in the engine's environment.
SEED: Final = "vllm-none-hash"
_64_BITS: Final = 2**64 - 1
_ARRAY, _TEXT, _BYTES, _NEGATIVE, _UNSIGNED = 4, 3, 2, 1, 0
_NULL: Final = b"\xf6"

Value = int | str | bytes | Sequence["Value"] | None


def block_hashes(
    token_ids: Sequence[int],
    block_size: int,
    *,
    salt: str = "",
    adapter: tuple[str, str] | None = None,
    media: Sequence[tuple[str, int, int]] = (),
    seed: str = SEED,
) -> list[bytes]:
    """The digests (32 bytes) of the full blocks of a prompt.

    `adapter` is a LoRA adapter's name and path as the engine has them, `media` each an identifier, offset and length in tokens, in order.
    """
    parent = _digest(seed)
    digests: list[bytes] = []
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        extra = tuple(_extra_keys(start, start + block_size, salt, adapter, media)) or None
        parent = _digest((parent, token_ids[start : start + block_size], extra))
        digests.append(parent)
    return digests


def event_hash(digest: bytes) -> int:
    """The number by which events name a block of this digest, unless VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0."""
    return int.from_bytes(digest, "big") & _64_BITS


def _extra_keys(
    start: int, end: int, salt: str, adapter: tuple[str, str] | None, media: Sequence[tuple[str, int, int]]
) -> Iterator[tuple[Value, ...]]:
    if adapter:
        yield "lora", *adapter
    for identifier, offset, length in media:
        if offset < end and offset + length > start:
            yield "mm", identifier, offset - start
    if salt and start == 0:
        yield "cache_salt", salt


def _digest(value: Value) -> bytes:
    return hashlib.sha256(b"".join(_cbor(value))).digest()


def _cbor(value: Value) -> Iterator[bytes]:
    """Canonical CBOR (RFC 8949, 4.2.1) of what is in a block's key."""
    match value:
        case None:
            yield _NULL
        case int():
            yield _head(_UNSIGNED, value) if value >= 0 else _head(_NEGATIVE, -1 - value)
        case str():
            encoded = value.encode()
            yield _head(_TEXT, len(encoded))
            yield encoded
        case bytes():
            yield _head(_BYTES, len(value))
            yield value
        case _:
            yield _head(_ARRAY, len(value))
            for item in value:
                yield from _cbor(item)


def _head(major: int, argument: int) -> bytes:
    """The first bytes of an item: its type, and a number in the shortest form."""
    if argument < 24:
        return bytes([major << 5 | argument])
    for code, size in enumerate((1, 2, 4, 8)):
        if argument < 1 << (8 * size):
            return bytes([major << 5 | 24 + code]) + argument.to_bytes(size, "big")
    raise OverflowError(f"{argument} has no form in CBOR")
