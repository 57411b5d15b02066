"""LoRA adapters: loaded and unloaded over the whole fleet, chosen by name in each call.

A load happens on every worker or on none. The next call after it gets the new weights wherever it is placed, calls in flight keep the old
ones, and a worker that comes later gets every adapter before its first call.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta, field

from core import (
    BadRequest,
    Call,
    ModelCard,
    NotFound,
    NoWorker,
    PluginSettings,
    Proxy,
    Routes,
    Worker,
    hookimpl,
)
from plugins.lora.adapters import Adapters
from plugins.lora.finishing import Finisher
from plugins.lora.routes import AdapterRoutes
from plugins.lora.source import Paths
from plugins.lora.version import Version

#: Under this name a call keeps its version.
_NOTE: Final = "lora"


class Settings(PluginSettings, frozen=True):
    """`[plugins.lora]`."""

    #: Folders under which adapters may lie; with none, no path is taken. Absolute. Prime-RL: its output_dir.
    allowed_paths: list[str] = field(default_factory=list[str])
    #: Whether hub ids (`owner/name`), which the workers download, are taken.
    hub: bool = False
    #: Whether headrace sees the files that the workers see. If not, it doesn't look whether an adapter is there, or was written anew.
    shared_files: bool = True
    #: Seconds for each worker to load or unload one.
    deadline: Annotated[float, Meta(gt=0)] = 120.0

    def __post_init__(self) -> None:
        for path in self.allowed_paths:
            if not path.startswith("/"):
                raise ValueError(f"allowed_paths: {path!r} is not absolute")


class Lora:
    """The hooks, in the order in which they run."""

    settings_type = Settings

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._paths = Paths(settings.allowed_paths, hub=settings.hub, seen=settings.shared_files)
        self._finisher = Finisher()
        self._adapters: Adapters  # as soon as there is a proxy
        self._proxy: Proxy

    @hookimpl
    def register_routes(self, routes: Routes, proxy: Proxy) -> None:
        """See `core.hookspecs`."""
        self._proxy = proxy
        self._adapters = Adapters(proxy, deadline=self._settings.deadline)
        self._current = self._adapters.versions.current
        AdapterRoutes(self._adapters, self._paths, self._finisher, proxy.fleet).add_to(routes)

    @hookimpl
    def run_service(self) -> Callable[[], Awaitable[None]]:
        """See `core.hookspecs`."""
        return self._finisher.run

    @hookimpl
    async def prepare_worker(self, worker: Worker) -> None:
        """See `core.hookspecs`."""
        await self._adapters.prepare(worker)

    @hookimpl
    def worker_left(self, worker: Worker) -> None:
        """See `core.hookspecs`."""
        self._adapters.forget(worker)

    @hookimpl
    def receive_call(self, call: Call) -> None:
        """See `core.hookspecs`."""
        if call.unclaimed and (raw := call.unclaimed.pop("lora_name", None)) is not None:
            version = self._named(call, raw)
        elif call.model:
            version = self._current.get(call.model)
        else:
            version = self._of_the_only_model()
        if version is None:
            return
        if call.model in ("", version.name):
            call.model = version.base
        call.reply_model = version.name
        call.adapter = version.on_workers
        call.reply_headers["x-headrace-adapter"] = version.on_workers
        call.notes[_NOTE] = version
        version.calls += 1

    @hookimpl
    def eligible_workers(self, call: Call, workers: Sequence[Worker]) -> Sequence[Worker] | None:
        """See `core.hookspecs`."""
        version: Version | None = call.notes.get(_NOTE) if call.adapter else None
        if version is None:
            return None
        holders = [worker for worker in workers if worker in version.holders]
        if not holders:
            raise NoWorker(f"no worker that is ready has loaded LoRA adapter `{version.name}`")
        return holders

    @hookimpl
    def call_settled(self, call: Call) -> None:
        """See `core.hookspecs`."""
        version: Version | None = call.notes.get(_NOTE) if call.adapter else None
        if version is None:
            return
        version.calls -= 1
        if version.retired and not version.calls:
            self._finisher.start(self._adapters.sweep)

    @hookimpl
    def list_models(self) -> Sequence[ModelCard]:
        """See `core.hookspecs`."""
        return [
            ModelCard(id=version.name, created=version.created, root=version.source.path, parent=version.base)
            for _, version in sorted(self._current.items())
            if not version.is_alias
        ]

    def _named(self, call: Call, raw: msgspec.Raw) -> Version | None:
        """What `lora_name` of the body asks for; `model` may then be the model's own name, or the same one."""
        try:
            name = msgspec.json.decode(raw, type=str | None)
        except msgspec.MsgspecError as error:
            raise BadRequest(f"lora_name: {error}", param="lora_name") from error
        if not name:
            return self._current.get(call.model) if call.model else self._of_the_only_model()
        version = self._current.get(name)
        if version is None:
            raise NotFound(f"LoRA adapter `{name}` is not loaded", param="lora_name")
        other = self._current.get(call.model)
        if other and other is not version and not other.is_alias:
            raise BadRequest(f"lora_name: model says {call.model!r} and lora_name says {name!r}; send one", param="lora_name")
        return version

    def _of_the_only_model(self) -> Version | None:
        """The adapter that stands in for the model, for calls that don't name it."""
        if not self._current:
            return None
        # Paused ones count: the call will wait for them.
        models = {worker.models[0] for worker in self._proxy.fleet.workers.values() if worker.state not in ("starting", "gone")}
        return self._current.get(models.pop()) if len(models) == 1 else None
