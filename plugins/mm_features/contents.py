"""What a renderer's hashes stand for: remembered, so that one that changes its meaning is caught, and kept, so that it can be sent alone.

Both are bounded and forget what was used least recently.
"""

from collections import OrderedDict

from msgspec import Struct


class Content(Struct, frozen=True):
    """One item's bytes, and the SHA-256 that names them, see `digest_of`."""

    digest: str
    data: bytes


class Contents:
    """Remembers `max_names` hashes, and keeps contents of `max_bytes` together."""

    def __init__(self, *, max_names: int, max_bytes: int) -> None:
        self._max_names = max_names
        self._max_bytes = max_bytes
        self._digests: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._kept: OrderedDict[str, Content] = OrderedDict()
        self._bytes = 0

    def digest_of(self, modality: str, name: str) -> str | None:
        """The digest of what a name stands for; `None` when it's not remembered."""
        return self._digests.get((modality, name))

    def remember(self, modality: str, name: str, digest: str) -> None:
        """Note what a name stands for."""
        self._digests[modality, name] = digest
        self._digests.move_to_end((modality, name))
        if len(self._digests) > self._max_names:
            self._digests.popitem(last=False)

    def keep(self, content: Content) -> None:
        """Keep a content for `find`, unless it alone is too large."""
        if len(content.data) > self._max_bytes:
            return
        if content.digest not in self._kept:
            self._kept[content.digest] = content
            self._bytes += len(content.data)
        self._kept.move_to_end(content.digest)
        while self._bytes > self._max_bytes:
            _, oldest = self._kept.popitem(last=False)
            self._bytes -= len(oldest.data)

    def find(self, modality: str, name: str) -> Content | None:
        """The content that a name stands for, if it's still kept."""
        digest = self._digests.get((modality, name))
        if digest is None or (content := self._kept.get(digest)) is None:
            return None
        self._digests.move_to_end((modality, name))
        self._kept.move_to_end(digest)
        return content
