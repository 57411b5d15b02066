"""Where an adapter comes from: whether it may come from there, and whether it is there."""

import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import trio
from msgspec import Struct

from core import BadRequest, NotFound

#: An id on the Hugging Face hub: `owner/name`.
_HUB_ID: Final = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
_CONFIG: Final = "adapter_config.json"


class Source(Struct, frozen=True):
    """What was loaded: a folder, or a hub id.

    `files` are the adapter's files with size and time of the last change (ns), so that a folder that was written anew is another source;
    `None` when nobody looked.
    """

    path: str
    #: 3-D weights for the experts of an MoE model (vLLM's `is_3d_lora_weight`).
    is_3d: bool = False
    files: tuple[tuple[str, int, int], ...] | None = None

    def same_as(self, other: "Source") -> bool | None:
        """Whether both have the same weights; `None` when it's the same place, and nobody knows what lay there then or lies there now."""
        if (self.path, self.is_3d) != (other.path, other.is_3d):
            return False
        return None if self.files is None or other.files is None else self.files == other.files


class Paths:
    """The rule for paths: `allowed` folders (and what is below them), hub ids if `hub`. With `seen` headrace has the workers' files."""

    def __init__(self, allowed: Sequence[str], *, hub: bool, seen: bool) -> None:
        self._allowed = allowed
        self._hub = hub
        self._seen = seen

    async def source(self, path: str, *, is_3d: bool) -> Source:
        """Check a path and look what is there.

        Cancellation: at once; a look into a file system that hangs is left to its thread.
        Raises: `BadRequest` for a path that is not allowed, `NotFound` while no adapter is there.
        """
        if not path.strip() or not path.isprintable():
            raise BadRequest("lora_path must be an absolute path or a hub id", param="lora_path")
        if not path.startswith("/"):
            self._check_hub_id(path)
            return Source(path, is_3d)
        return await trio.to_thread.run_sync(self._look, path, is_3d, abandon_on_cancel=True)

    def _check_hub_id(self, path: str) -> None:
        if not _HUB_ID.fullmatch(path):
            raise BadRequest(f"lora_path: {path!r} is neither an absolute path nor a hub id (owner/name)", param="lora_path")
        if not self._hub:
            raise BadRequest(f"lora_path: {path!r} is a hub id; [plugins.lora] hub = true allows these", param="lora_path")

    def _look(self, path: str, is_3d: bool) -> Source:
        if ".." in Path(path).parts:  # what it leads to, the workers might see otherwise
            raise BadRequest(f"lora_path: {path!r} has '..' in it; write where it leads", param="lora_path")
        # A link must not lead out of what is allowed.
        real = Path(os.path.realpath(path))
        if not any(real.is_relative_to(os.path.realpath(prefix)) for prefix in self._allowed):
            allowed = ", ".join(self._allowed) or "none"
            raise BadRequest(f"lora_path: {path!r} is not under [plugins.lora] allowed_paths ({allowed})", param="lora_path")
        return Source(path, is_3d, _files(path) if self._seen else None)


def _files(path: str) -> tuple[tuple[str, int, int], ...]:
    """Raises: `NotFound`, also when the folder can't be read: on a network file system that passes."""
    try:
        with os.scandir(path) as entries:
            found = [(entry.name, entry.stat()) for entry in entries if entry.name.startswith("adapter_")]
    except OSError as error:
        raise NotFound(f"lora_path: {path!r} can't be read: {error.strerror}", param="lora_path") from error
    files = {name: status for name, status in found if stat.S_ISREG(status.st_mode)}
    if _CONFIG not in files:
        raise NotFound(f"lora_path: there is no {_CONFIG} in {path!r}", param="lora_path")
    return tuple(sorted((name, status.st_size, status.st_mtime_ns) for name, status in files.items()))
