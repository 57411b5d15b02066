"""What one engine's events say, put into the index under our own names.

An event has the tokens of its blocks, and what else makes them differ. The salt stands in a prompt's first block only, so a block that
continues a prompt has the salt of the block before it, as it has its tokens: by that block's name.
"""

from collections.abc import Sequence
from typing import Any, Final

from plugins.routing_kv.events import Cleared, Event, Removed, Stored, key_of
from plugins.routing_kv.hashing import TOKEN_BYTES, BlockName, name_of, packed, root
from plugins.routing_kv.index import MEDIA, Holder, Medium

#: Groups of layers that don't need every block of a prompt; those that do say which prefixes an engine has.
_WINDOWED: Final = frozenset(
    {
        "sliding_window",
        "sliding_window_mla",
        "mamba",
        "chunked_local_attention",
        "encoder_only_attention",
        "cross_attention",
    }
)


class Feed:
    """Applies events, in their order, to one holder.

    A model with several groups of layers announces each block once a group. The first group that attends to whole prompts stands for all.
    """

    def __init__(self, holder: Holder) -> None:
        self.holder = holder
        #: Of the engine, in tokens; 0 until it has stored something.
        self.block_size = 0
        #: Whether every event since the engine started, or last emptied its cache, has come: then it has what the index says, all of it.
        self.whole = False
        self.stored = self.removed = self.cleared = 0
        #: Blocks whose parent isn't known, because its event was before our time.
        self.orphans = 0
        #: Events that contradict themselves.
        self.malformed = 0
        self._group: int | None = None

    def apply(self, event: Event) -> None:
        """One event."""
        match event:
            case Stored():
                self._store(event)
            case Removed():
                self._remove(event)
            case Cleared():
                self.cleared += 1
                self.holder.clear()
                self.whole = True

    def restart(self) -> None:
        """Forget everything: the engine is another one, or events of it are lost for good."""
        self.holder.clear()
        self.whole = False
        self._group = None

    def _store(self, event: Stored) -> None:
        medium = _medium(event.medium)
        if medium is None or not self._is_ours(event):
            return
        if not event.token_ids:
            self._copy(medium, event)
            return
        hashes, size = event.block_hashes, event.block_size
        extra_keys = event.extra_keys or (None,) * len(hashes)
        if size < 1 or len(event.token_ids) != size * len(hashes) or len(extra_keys) != len(hashes):
            self.malformed += 1
            return
        try:
            tokens = packed(event.token_ids)
        except OverflowError:
            self.malformed += 1
            return
        adapter = event.lora_name or ""
        if event.parent_block_hash is None:
            name = root(_salt(extra_keys[0], adapter), adapter)
        elif (found := self.holder.find(key_of(event.parent_block_hash))) is not None:
            name = found
        else:
            self.orphans += len(hashes)
            return
        self.block_size = size
        self.stored += len(hashes)
        self._store_all(medium, event, name, tokens, extra_keys)

    def _store_all(self, medium: Medium, event: Stored, name: BlockName, tokens: bytes, extra_keys: Sequence[list[Any] | None]) -> None:
        step = event.block_size * TOKEN_BYTES
        first = event.parent_block_hash is None
        for index, engine_hash in enumerate(event.block_hashes):
            keys = extra_keys[index]
            extra = _extra(keys, event.lora_name or "", salted=first and index == 0) if keys else None
            name = name_of(name, tokens[index * step : (index + 1) * step], extra)
            self.holder.store(medium, key_of(engine_hash), name)

    def _copy(self, medium: Medium, event: Stored) -> None:
        """Blocks were copied to another medium: they are those that the engine has elsewhere."""
        for engine_hash in event.block_hashes:
            key = key_of(engine_hash)
            name = self.holder.find(key)
            if name is None:
                self.orphans += 1
            else:
                self.stored += 1
                self.holder.store(medium, key, name)

    def _remove(self, event: Removed) -> None:
        medium = _medium(event.medium)
        if medium is None or not _is_local(event.locality) or (event.group_idx or 0) != self._group:
            return
        self.removed += len(event.block_hashes)
        for engine_hash in event.block_hashes:
            self.holder.remove(medium, key_of(engine_hash))

    def _is_ours(self, event: Stored) -> bool:
        if event.kv_cache_spec_kind in _WINDOWED or not _is_local(event.locality):
            return False
        group = event.group_idx or 0
        if self._group is None:
            self._group = group
        return group == self._group


def _medium(name: str | None) -> Medium | None:
    if name is None:
        return "GPU"
    return next((medium for medium in MEDIA if medium == name), None)


def _is_local(locality: str | None) -> bool:
    return locality is None or locality.upper() == "LOCAL"


def _salt(keys: list[Any] | None, adapter: str) -> str:
    """The salt of a prompt, from its first block: the string that isn't the adapter's name, which stands before it."""
    strings = [key for key in keys or () if isinstance(key, str)]
    if adapter and strings[:1] == [adapter]:
        strings = strings[1:]
    return strings[0] if strings else ""


def _extra(keys: list[Any], adapter: str, *, salted: bool) -> Any:
    """What makes a block differ beside its tokens, as `Prompt` has it; adapter and salt are in the root already."""
    extra: list[Any] = []
    strings: list[str] = []
    for key in keys:
        if isinstance(key, str):
            strings.append(key)
        elif isinstance(key, list) and len(key) == 2 and isinstance(key[0], str) and isinstance(key[1], int):
            extra.append((key[0], key[1]))
        else:  # embeddings in the place of tokens, or what isn't known yet: no call can have the same
            extra.append(repr(key))
    if adapter and strings[:1] == [adapter]:
        strings = strings[1:]
    extra += strings[1:] if salted else strings
    return tuple(extra) or None
