"""The `content_parts` of a call: media as they are, which the worker fetches, prepares, and expands in the prompt.

An address may only be one that carries its content, or one on a host that the settings name: the worker would fetch any other as well.
"""

import re
from collections.abc import Set
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Raw, Struct

from core import BadRequest, refusing
from plugins.mm_features.base64 import decode_base64
from plugins.mm_features.features import Modality, digest_of

_PATH: Final = "content_parts"
_DATA: Final = re.compile(r"data:[\w.+-]+/[\w.+-]+(?:;[\w.+-]+=[\w.+-]+)*;base64,")
#: Nothing that two readers of addresses might understand differently: no user, no backslash, nothing beyond ASCII.
_HTTP: Final = re.compile(r"https?://([A-Za-z0-9.-]+)(?::\d{1,5})?(?:[/?#][!-\[\]-~]*)?")
_MODALITIES: Final[dict[str, Modality]] = {"image_url": "image", "audio_url": "audio", "video_url": "video"}


class _Part(Struct, forbid_unknown_fields=True):
    type: Literal["image_url", "audio_url", "video_url"]
    url: str
    uuid: Annotated[str, Meta(min_length=1, max_length=512)] | None = None


_Parts: Final = Annotated[list[_Part], Meta(min_length=1, max_length=1024)]


class Part(Struct, frozen=True):
    """One medium. `digest` names its content; it is empty for an address, whose content only the worker sees."""

    type: str
    url: str
    #: The name that the client gave it; empty for none.
    hash: str
    digest: str
    #: In the request.
    hash_path: str

    @property
    def modality(self) -> Modality:
        """What kind of medium it is."""
        return _MODALITIES[self.type]

    @property
    def identity(self) -> str:
        """What names it: its content, or else its address. Calls with one address may share KV."""
        return self.digest or "at:" + digest_of(self.modality, self.url.encode())

    def lower(self, identifier: str) -> dict[str, Any]:
        """As vLLM reads it: `uuid` is the identifier under which it is cached, and without one the worker hashes the content."""
        part = {"type": self.type, "url": self.url}
        return part | {"uuid": identifier} if self.digest else part


def read_parts(raw: Raw, hosts: Set[str]) -> list[Part]:
    """The media, in their order. Takes some milliseconds per megabyte.

    Raises: `BadRequest`.
    """
    with refusing(_PATH, _Parts):
        parts: list[_Part] = msgspec.json.decode(raw, type=_Parts)
    return [_read(part, f"{_PATH}[{index}]", hosts) for index, part in enumerate(parts)]


def _read(part: _Part, path: str, hosts: Set[str]) -> Part:
    if head := _DATA.match(part.url):
        try:
            content = decode_base64(part.url[head.end() :])
        except ValueError as error:
            raise BadRequest(f"{path}.url: it is no base64: {error}", param=f"{path}.url") from error
        return Part(part.type, part.url, part.uuid or "", digest_of(_MODALITIES[part.type], content), f"{path}.uuid")
    found = _HTTP.fullmatch(part.url)
    if not found or found[1].lower() not in hosts:
        allowed = f", or be on one of {', '.join(sorted(hosts))}" if hosts else ""
        raise BadRequest(f"{path}.url: it must start with data:<type>;base64,{allowed} (plugins.mm-features.hosts)", param=f"{path}.url")
    if part.uuid:
        raise BadRequest(f"{path}.uuid: only the worker sees what is at that address, so its name can't be checked", param=f"{path}.uuid")
    return Part(part.type, part.url, "", "", f"{path}.uuid")
