"""Multimodal features: media that the client has prepared, or sends as they are, on their way to a worker that has eyes and ears.

vLLM's HTTP server ignores prepared features and answers as if there had been text only; its gRPC takes them. This plugin checks them before
an engine meets them, and names them by their content, so that no two media are ever taken for each other, and equal ones share their KV.
"""

from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Final, Literal

import trio
from msgspec import Raw, Struct
from msgspec.structs import replace

from core import OVER_GRPC, OVER_HTTP, BadRequest, Call, CallError, GenerateReply, Output, PluginSettings, Worker, hookimpl
from core.wire.generated.inference_pb2 import GenerateRequest
from plugins.mm_features.contents import Content, Contents
from plugins.mm_features.features import Feature, is_null, read_features
from plugins.mm_features.parts import Part, read_parts

_NAME: Final = "mm-features"
_FEATURES: Final = "features"
_PARTS: Final = "content_parts"
#: vLLM 0.33 takes no more over gRPC, of all items of a call together.
MAX_BYTES: Final = 16 << 20
#: What is longer is read in a thread, of which there are so many: less than a millisecond of a loop that serves others.
_LONG: Final = 128 << 10
_THREADS: Final = 2


class Settings(PluginSettings, frozen=True):
    """`[plugins.mm-features]`."""

    #: The part of the model that looks and listens. `frozen`: nothing changes it. `adapter`: adapters do. `trained`: updates do too.
    #: What it made of a medium is then not shared between adapters; nor, if it is trained, between salts, which are policy versions.
    tower: Literal["frozen", "adapter", "trained"] = "frozen"
    store_mib: int = 0  #: how much content to keep, for clients that send an item again as its hash alone; 0: refuse these
    remember: int = 65_536  #: of how many hashes to remember what they stand for
    hosts: tuple[str, ...] = ()  #: from which workers may fetch media by http or https


class _Unread(Struct, frozen=True):
    """A claimed member of the body."""

    key: str
    raw: Raw

    def read(self, prompt_length: int, hosts: frozenset[str]) -> list[Feature] | list[Part]:
        return read_features(self.raw, prompt_length) if self.key == _FEATURES else read_parts(self.raw, hosts)


class MultimodalFeatures:
    """A call has `features`, which go over gRPC, or `content_parts`, which go over HTTP: only there a worker says where it put them."""

    settings_type = Settings

    def __init__(self, settings: Settings) -> None:
        self._tower = settings.tower
        self._hosts = frozenset(host.lower() for host in settings.hosts)
        self._stores = settings.store_mib > 0
        self._contents = Contents(max_names=settings.remember, max_bytes=settings.store_mib << 20)
        self._threads = trio.CapacityLimiter(_THREADS)

    @hookimpl
    def receive_call(self, call: Call) -> None:
        """See `core.hookspecs`."""
        if not call.unclaimed or call.relayed:
            return
        claimed = [_Unread(key, raw) for key in (_FEATURES, _PARTS) if (raw := call.unclaimed.pop(key, None)) and not is_null(raw)]
        if not claimed:
            return
        if len(claimed) > 1:
            raise BadRequest(f"{_FEATURES} and {_PARTS} exclude each other; send one", param=_FEATURES)
        if claimed[0].key == _FEATURES:
            if call.ec_transfer_params:  # they name the items, which get other names here
                raise BadRequest("ec_transfer_params: they can't go with features", param="ec_transfer_params")
            call.need(OVER_GRPC, by=_FEATURES)
        else:
            call.need(OVER_HTTP, by=_PARTS)
            call.return_token_ids = True  # they tell how long the prompt has become
        call.notes[_NAME] = claimed[0]

    @hookimpl
    def prepare_call(self, call: Call) -> Awaitable[None] | None:
        """See `core.hookspecs`."""
        unread: _Unread | None = call.notes.get(_NAME)
        if unread is None:
            return None
        if len(memoryview(unread.raw)) > _LONG:
            return self._prepare_in_thread(call, unread)
        self._prepare(call, unread.read(len(call.token_ids), self._hosts))
        return None

    async def _prepare_in_thread(self, call: Call, unread: _Unread) -> None:
        media = await trio.to_thread.run_sync(unread.read, len(call.token_ids), self._hosts, limiter=self._threads)
        self._prepare(call, media)

    def _prepare(self, call: Call, media: list[Feature] | list[Part]) -> None:
        for item in media:
            if isinstance(item, Feature) and not item.digest:
                self._fill(item)
        total = sum(len(item.data) for item in media if isinstance(item, Feature))
        if total > MAX_BYTES:
            raise CallError(413, f"features: {total:,} bytes; a worker takes {MAX_BYTES:,} over gRPC", param=_FEATURES)
        self._check_hashes(media)
        call.notes[_NAME] = media

    def _fill(self, item: Feature) -> None:
        """Give an item, of which the client sent only the hash, its content."""
        path = item.path("kwargs_data")
        if not self._stores:
            why = "null means that the worker has it already, which gRPC can't say; send it, or set plugins.mm-features.store_mib"
            raise BadRequest(f"{path}: {why}", param=path)
        content = self._contents.find(item.modality, item.hash)
        if content is None:
            raise BadRequest(f"{path}: null, and what this hash stands for isn't stored here, or no more; send it", param=path)
        item.data, item.digest = content.data, content.digest

    def _check_hashes(self, media: Sequence[Feature | Part]) -> None:
        named = [item for item in media if item.hash]
        within: dict[tuple[str, str], str] = {}
        for item in named:
            if (
                within.setdefault((item.modality, item.hash), item.digest) != item.digest
                or self._contents.digest_of(item.modality, item.hash) not in (None, item.digest)
            ):  # fmt: skip
                raise BadRequest(f"{item.hash_path}: this hash stands for another content; a hash must name one", param=item.hash_path)

    @hookimpl
    def identify_call(self, call: Call) -> None:
        """See `core.hookspecs`."""
        media: Sequence[Feature | Part] | None = call.notes.get(_NAME)
        if media is None:
            return
        adapter = call.adapter if self._tower != "frozen" else ""
        for item in media:
            if (adapter or self._tower == "trained") and not item.digest:
                path = f"{item.hash_path.rpartition('.')[0]}.url"
                raise BadRequest(f"{path}: where plugins.mm-features.tower isn't frozen, media must be sent as data:", param=path)
        call.identity = replace(
            call.identity,
            media=tuple(f"{adapter}:{item.identity}" if adapter else item.identity for item in media),
            media_by_salt=self._tower == "trained",
            media_ranges=tuple((item.offset, item.length) for item in media if isinstance(item, Feature)),
        )

    @hookimpl
    def eligible_workers(self, call: Call, workers: Sequence[Worker]) -> Sequence[Worker] | None:
        """See `core.hookspecs`."""
        media: Sequence[Feature | Part] | None = call.notes.get(_NAME)
        if media is None:
            return None
        raw = isinstance(media[0], Part)
        seeing = [worker for worker in workers if _sees(worker, raw=raw)]
        if not seeing:
            key = _PARTS if raw else _FEATURES
            raise BadRequest(f"{key}: no worker that is ready has a model that takes media", param=key)
        return seeing

    @hookimpl
    def lower_call(self, call: Call, worker: Worker, request: Any) -> None:
        """See `core.hookspecs`."""
        media = call.notes.get(_NAME)
        if media is None:
            return
        identifiers = call.identity.media_under(call.identity.namespace_on(worker))
        for item, identifier in zip(media, identifiers, strict=True):
            if isinstance(request, GenerateRequest):
                item.lower(request.media.add(), identifier)
            else:
                request.setdefault(_PARTS, []).append(item.lower(identifier))

    @hookimpl
    def lift_output(self, call: Call, output: Output) -> None:
        """See `core.hookspecs`."""
        if _NAME not in call.notes:
            return
        if output.choice.finish_reason is not None:
            self._remember(call.notes[_NAME])
        if output.prompt_token_ids is not None:
            output.mm_placeholders = _placeholders(call, output.mm_placeholders)

    @hookimpl
    def lift_result(self, call: Call, result: GenerateReply) -> None:
        """See `core.hookspecs`."""
        if _NAME not in call.notes:
            return
        self._remember(call.notes[_NAME])
        if call.return_token_ids:
            result.mm_placeholders = _placeholders(call, result.mm_placeholders)

    def _remember(self, media: Sequence[Feature | Part]) -> None:
        """Only what a worker has taken says what a hash stands for. Before the client knows, since its next call may count on it."""
        for item in media:
            # Of two calls at once that disagree, the first to be answered is right.
            if item.hash and self._contents.digest_of(item.modality, item.hash) in (None, item.digest):
                self._contents.remember(item.modality, item.hash, item.digest)
                if self._stores and isinstance(item, Feature):
                    self._contents.keep(Content(item.digest, item.data))


def _sees(worker: Worker, *, raw: bool) -> bool:
    """A worker without gRPC doesn't tell; it is asked for raw media only, which its server refuses itself when its model takes none."""
    return bool(worker.info and worker.info.supports_multimodal) or (raw and worker.control is None)


def _placeholders(call: Call, told: Mapping[str, Any] | None) -> dict[str, Any]:
    """Where the media are in the prompt: `features` said it, for `content_parts` the worker does."""
    media: Sequence[Feature | Part] = call.notes[_NAME]
    places: dict[str, Any] = {}
    for item in media:
        if isinstance(item, Feature):
            places.setdefault(item.modality, []).append({"offset": item.offset, "length": item.length})
    if not places and not told:
        raise CallError(502, "the worker answered as if there had been no content_parts")
    return places or dict(told or {})
