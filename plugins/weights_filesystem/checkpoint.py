"""Where a checkpoint may lie, and when it is there."""

import os
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Final

import msgspec
import trio

from core import BadRequest, CallError, NotFound

#: Seconds between two looks for a marker.
_LOOK: Final = 0.2
#: In bytes: Linux opens no longer one, and to follow each part of it takes a look at the file system.
_LONGEST_PATH: Final = 4096
_INDEX: Final = "model.safetensors.index.json"
#: In bytes; safetensors itself reads no longer one.
_LONGEST_HEADER: Final = 100_000_000


class Checkpoints:
    """The rule for paths: `allowed` folders and what is below them. With `seen` headrace has the workers' files.

    Looks into a file system that hangs block nothing: they are left to their threads.
    """

    def __init__(self, allowed: Sequence[str], *, seen: bool) -> None:
        self._allowed = allowed
        self._seen = seen

    def demand_plain(self, path: str) -> None:
        """Refuse a path that not everybody would understand alike, without a look. Raises: `BadRequest`."""
        if (length := len(path.encode())) > _LONGEST_PATH:
            raise BadRequest(f"path: {path[:60]!r}… has {length} bytes; {_LONGEST_PATH} are allowed", param="path")
        if not path.startswith("/") or not path.isprintable() or ".." in Path(path).parts:
            raise BadRequest(f"path: {path!r} must be absolute, without '..' and without control characters", param="path")

    async def wait(self, path: str, markers: Sequence[str], seconds: float) -> None:
        """Wait until one of the marker files lies in the folder; with none, it is complete as it is. Then look that it has weights.

        Cancellation: at once.
        Raises: `BadRequest` for a path that isn't allowed; `NotFound` for one without weights; `CallError` (504) when no marker has come
        within so many seconds.
        """
        await trio.to_thread.run_sync(self._demand_allowed, path, abandon_on_cancel=True)
        if not self._seen:
            return
        if markers:
            await _wait_for_one_of(path, markers, seconds)
        await trio.to_thread.run_sync(_demand_weights, path, abandon_on_cancel=True)

    def _demand_allowed(self, path: str) -> None:
        real = Path(os.path.realpath(path))  # a link must not lead out of what is allowed
        if not any(real.is_relative_to(os.path.realpath(prefix)) for prefix in self._allowed):
            allowed = ", ".join(self._allowed) or "none"
            raise BadRequest(f"path: {path!r} is not under [plugins.weights-filesystem] allowed_paths ({allowed})", param="path")


async def _wait_for_one_of(path: str, markers: Sequence[str], seconds: float) -> None:
    with trio.move_on_after(seconds):
        while True:
            if await trio.to_thread.run_sync(_has_one_of, path, markers, abandon_on_cancel=True):
                return
            await trio.sleep(_LOOK)
    text = f"path: none of {', '.join(markers)} came into {path!r} within {seconds:g} s: it isn't complete"
    raise CallError(HTTPStatus.GATEWAY_TIMEOUT, text, param="path")


def _has_one_of(path: str, markers: Sequence[str]) -> bool:
    return any(Path(path, name).exists() for name in markers)


def _demand_weights(path: str) -> None:
    """Raises: `NotFound`, also when the folder can't be read.

    vLLM 0.31 doesn't recover from a checkpoint that turns out to be broken half-way, so whatever can be seen beforehand is looked at.
    """
    try:
        names = set(os.listdir(path))
        wanted = _listed(Path(path, _INDEX)) if _INDEX in names else set[str]()
        found = sorted(name for name in names if name.endswith(".safetensors"))
        broken = next((name for name in found if not _is_whole(Path(path, name))), None)
    except OSError as error:
        raise NotFound(f"path: {path!r} can't be read: {error.strerror}", param="path") from error
    except msgspec.MsgspecError as error:
        raise NotFound(f"path: {_INDEX} in {path!r} can't be read: {error}", param="path") from error
    if not found:
        raise NotFound(f"path: there are no *.safetensors in {path!r}", param="path")
    if broken:
        raise NotFound(f"path: {broken} in {path!r} is not a whole safetensors file", param="path")
    if missing := sorted(wanted - names):
        raise NotFound(f"path: {path!r} lacks {missing[0]}, which {_INDEX} names", param="path")


def _is_whole(file: Path) -> bool:
    """Whether it is as long as its header says: 8 bytes for the header's length, the header, and what that describes."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > _LONGEST_HEADER:
            return False
        try:
            header = msgspec.json.decode(opened.read(length), type=dict[str, _Entry])
        except msgspec.MsgspecError:
            return False
        return os.fstat(opened.fileno()).st_size == 8 + length + max((entry.data_offsets[1] for entry in header.values()), default=0)


class _Entry(msgspec.Struct):
    """A tensor in a header, or `__metadata__`, which takes no place."""

    data_offsets: tuple[int, int] = (0, 0)


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _listed(index: Path) -> set[str]:
    return set(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values())
