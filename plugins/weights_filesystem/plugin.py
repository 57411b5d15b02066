"""Offers the transport `filesystem`: waits until the trainer has written its checkpoint, then lets every worker read it."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, field

from core import Member, PluginSettings, WeightTransport, WeightUpdate, WorkerControl, hookimpl, refusing
from plugins.weights_filesystem.checkpoint import Checkpoints

Loader = Literal["reload_weights", "update_weights_from_path"]


class Settings(PluginSettings, frozen=True):
    """`[plugins.weights-filesystem]`."""

    #: Folders under which checkpoints may lie; with none, no path is taken. Absolute. Prime-RL: its output_dir.
    allowed_paths: list[str] = field(default_factory=list[str])
    #: Whether headrace sees the files that the workers see. If not, it waits for no marker, and looks for no weights.
    shared_files: bool = True
    #: A checkpoint is complete as soon as one of these files lies in its folder; with none, it is complete as it is.
    markers: list[str] = field(default_factory=lambda: ["STABLE", ".finished"])
    #: Seconds to wait for it; calls go on meanwhile.
    marker_timeout: Annotated[float, Meta(gt=0)] = 600.0
    #: How workers load it unless the request says otherwise: vLLM's own method, or that of Prime-RL's worker extension.
    method: Loader = "reload_weights"

    def __post_init__(self) -> None:
        for path in self.allowed_paths:
            if not path.startswith("/"):
                raise ValueError(f"allowed_paths: {path!r} is not absolute")
        for name in self.markers:
            if not name or "/" in name:
                raise ValueError(f"markers: {name!r} is not the name of a file")


class Written(Struct, frozen=True, forbid_unknown_fields=True):
    """What the trainer has written: the transport's own keys of `POST /fleet/updates`."""

    path: str
    method: Loader | None = None


class WeightsFilesystem:
    """The hooks."""

    settings_type = Settings

    def __init__(self, settings: Settings) -> None:
        self._transport = FilesystemTransport(settings)

    @hookimpl
    def weight_transports(self) -> Sequence[WeightTransport]:
        """See `core.hookspecs`."""
        return [self._transport]


class FilesystemTransport:
    """Every worker reads the files by itself; headrace reads none of the weights."""

    name = "filesystem"
    repeatable = True
    grouped = False

    def __init__(self, settings: Settings) -> None:
        self._checkpoints = Checkpoints(settings.allowed_paths, seen=settings.shared_files)
        self._markers = settings.markers
        self._marker_timeout = settings.marker_timeout
        self._method: Loader = settings.method

    def parse(self, options: Mapping[str, Any]) -> Written:
        """See `core.WeightTransport`."""
        with refusing("", Written):
            written = msgspec.convert(options, Written)
        self._checkpoints.demand_plain(written.path)
        return written

    async def prepare(self, update: WeightUpdate) -> None:
        """See `core.WeightTransport`. Waits for a marker."""
        await self._checkpoints.wait(update.options.path, self._markers, self._marker_timeout)

    async def apply(self, update: WeightUpdate, member: Member, control: WorkerControl) -> None:
        """See `core.WeightTransport`. No deadline: how long a checkpoint takes depends on its size, and on the file system."""
        written: Written = update.options
        method = written.method or self._method
        arguments = {"kwargs": {"weights_path": written.path}} if method == "reload_weights" else {"args": [written.path]}
        if member.id in update.torn:
            await control.clear_reload()
        await control.collective_rpc({"method": method, **arguments})
