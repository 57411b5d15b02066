"""The `features` of a call: what a client's own processor made of its media, as vLLM's Python server takes it.

Parallel lists by modality. Here they become items in the order of their places in the prompt, each with its bytes, decoded once.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Raw, Struct

from core import BadRequest, refusing
from core.wire.generated.inference_pb2 import MediaItem
from plugins.mm_features.base64 import decode_base64
from plugins.mm_features.kwargs import check_kwargs
from plugins.mm_features.msgpack import Malformed

Modality = Literal["image", "video", "audio"]

#: More than any model takes; each one costs a look.
_MAX_ITEMS: Final = 1024
_PATH: Final = "features"
_NULL: Final = b"null"
_MODALITIES: Final = {"image": MediaItem.IMAGE, "video": MediaItem.VIDEO, "audio": MediaItem.AUDIO}


class _Range(Struct, forbid_unknown_fields=True):
    offset: Annotated[int, Meta(ge=0, lt=2**62)]
    length: Annotated[int, Meta(ge=1, lt=2**62)]
    is_embed: list[bool] | None = None


class _Features(Struct, forbid_unknown_fields=True):
    mm_hashes: dict[Modality, list[Annotated[str, Meta(min_length=1, max_length=512)]]]
    mm_placeholders: dict[Modality, list[_Range]]
    kwargs_data: dict[Modality, list[Raw]] | None = None
    #: For other servers; nobody reads it here.
    mm_metadata: dict[Modality, list[Raw]] | None = None


class Feature(Struct):
    """One item. `data` and `digest` are empty when the client sent only its hash."""

    modality: Modality
    hash: str
    #: The range in the prompt, in tokens; `is_embed` is empty when each of them takes an embedding.
    offset: int
    length: int
    is_embed: Sequence[bool]
    #: Where it stands in its modality's lists.
    index: int
    data: bytes = b""
    digest: str = ""

    def path(self, key: str) -> str:
        """Of one of its four parts in the request."""
        return f"{_PATH}.{key}.{self.modality}[{self.index}]"

    @property
    def hash_path(self) -> str:
        """Of its hash in the request."""
        return self.path("mm_hashes")

    @property
    def identity(self) -> str:
        """What names it."""
        return self.digest

    def lower(self, item: MediaItem, identifier: str) -> None:
        """Fill vLLM's message, under the identifier by which it is cached. The client's hash doesn't go along: it may be wrong."""
        item.modality = _MODALITIES[self.modality]
        features = item.features
        features.kwargs = self.data
        features.identifier = identifier
        features.mm_hash = self.digest
        features.offset = self.offset
        features.length = self.length
        features.is_embed.extend(self.is_embed)


def is_null(raw: Raw) -> bool:
    """Whether a JSON value is null."""
    return len(memoryview(raw)) == len(_NULL) and bytes(raw) == _NULL


def digest_of(modality: str, content: bytes) -> str:
    """What names a content, whoever sends it: SHA-256 over modality and bytes, in hexadecimal."""
    digest = hashlib.sha256(modality.encode() + b"\0")
    digest.update(content)
    return digest.hexdigest()


def read_features(raw: Raw, prompt_length: int) -> list[Feature]:
    """The items, checked each by itself. Takes some milliseconds per megabyte.

    Raises: `BadRequest`.
    """
    with refusing(_PATH, _Features):
        features = msgspec.json.decode(raw, type=_Features)
    _check_shapes(features)
    items = sorted(_items(features), key=lambda item: item.offset)
    _check_ranges(items, prompt_length)
    if features.kwargs_data is not None:
        for item in items:
            if not is_null(encoded := features.kwargs_data[item.modality][item.index]):
                item.data = _decode(encoded, item.path("kwargs_data"))
                item.digest = digest_of(item.modality, item.data)
    return items


def _check_shapes(features: _Features) -> None:
    counts = {modality: len(hashes) for modality, hashes in features.mm_hashes.items()}
    if not 0 < sum(counts.values()) <= _MAX_ITEMS:
        raise BadRequest(f"{_PATH}: {sum(counts.values())} items; from 1 to {_MAX_ITEMS} are allowed", param=_PATH)
    for key in ("mm_placeholders", "kwargs_data", "mm_metadata"):
        lists: dict[str, list[Any]] | None = getattr(features, key)
        if lists is not None and (found := {modality: len(entries) for modality, entries in lists.items()}) != counts:
            raise BadRequest(f"{_PATH}.{key}: it has {_count(found)}, and mm_hashes has {_count(counts)}", param=f"{_PATH}.{key}")


def _count(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {modality}" for modality, count in sorted(counts.items())) or "none"


def _items(features: _Features) -> Iterator[Feature]:
    for modality, hashes in features.mm_hashes.items():
        for index, (hash_, place) in enumerate(zip(hashes, features.mm_placeholders[modality], strict=True)):
            yield Feature(modality, hash_, place.offset, place.length, place.is_embed or (), index)


def _check_ranges(items: Sequence[Feature], prompt_length: int) -> None:
    end = 0
    for item in items:
        path = item.path("mm_placeholders")
        if item.offset < end:
            raise BadRequest(f"{path}: it starts at {item.offset}, inside another item's range", param=path)
        end = item.offset + item.length
        if end > prompt_length:
            raise BadRequest(f"{path}: it ends at {end}, and the prompt has {prompt_length} tokens", param=path)
        if item.is_embed and len(item.is_embed) != item.length:
            raise BadRequest(f"{path}.is_embed: {len(item.is_embed)} entries for {item.length} positions", param=f"{path}.is_embed")


def _decode(encoded: Raw, path: str) -> bytes:
    text = memoryview(encoded)
    if text[0] != ord('"'):
        raise BadRequest(f"{path}: it must be a string of base64, or null", param=path)
    try:
        data = decode_base64(text[1:-1])
    except ValueError:  # some encoders escape the slash
        data = _decode_escaped(encoded, path)
    try:
        check_kwargs(data)
    except Malformed as error:
        raise BadRequest(f"{path}: {error}", param=path) from error
    return data


def _decode_escaped(encoded: Raw, path: str) -> bytes:
    with refusing(path):
        text = msgspec.json.decode(encoded, type=str)
    try:
        return decode_base64(text)
    except ValueError as error:
        raise BadRequest(f"{path}: it is no base64: {error}", param=path) from error
