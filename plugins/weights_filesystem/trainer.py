"""The trainer's end of an update over a file system: it writes a checkpoint, and says where."""

# pyright: reportMissingImports=false
# What is missing from this project's environment is in the trainer's.

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from plugins.publishing import Publisher, whole

_MARKER = "STABLE"
_NAME = re.compile(r"\w[\w.-]*")


class FilesystemPublisher(Publisher):
    """Writes each version to `folder/version-<version>`, where headrace and the workers find it under the same path.

    The latest `keep` versions stay, at least one: a worker that comes later gets the newest from there. `options` are those of `Publisher`.
    """

    transport = "filesystem"

    def __init__(self, url: str, folder: str | Path, *, keep: int = 2, **options: Any) -> None:
        super().__init__(url, **options)
        self._folder = Path(folder).absolute()
        self._keep = max(keep, 1)
        self._written: list[Path] = []

    def publish(self, weights: Mapping[str, Tensor], version: str | int) -> None:
        """See `Publisher`. Raises: `ValueError` for a version that no folder can be named by; `OSError`."""
        if not _NAME.fullmatch(str(version)):
            raise ValueError(f"version {version!r}: of letters, digits, '.', '_' and '-'")
        tensors = whole(weights)
        written = self._folder / f"version-{version}"
        shutil.rmtree(written, ignore_errors=True)
        written.mkdir(parents=True)
        save_file(_apart(tensors), written / "model.safetensors", metadata={"format": "pt"})
        (written / _MARKER).touch()
        self._written = [*(other for other in self._written if other != written), written]
        self._ask(version, path=str(written)).wait()
        for old in self._written[: -self._keep]:
            shutil.rmtree(old, ignore_errors=True)
        self._written = self._written[-self._keep :]


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors that share no memory, as safetensors wants them: tied weights are written twice."""
    seen: set[int] = set()
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        memory = tensor.untyped_storage().data_ptr()
        found[name] = tensor.clone() if memory in seen else tensor.contiguous()
        seen.add(memory)
    return found
