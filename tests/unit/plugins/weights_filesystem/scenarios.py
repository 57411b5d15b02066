"""What a real publisher writes, with nobody to read it.

Runs in the engine's environment, which has torch: `python -m tests.unit.plugins.weights_filesystem.scenarios FOLDER` prints what came of
all of it as one object of JSON, for `test_writing.py`.
"""

# pyright: reportMissingImports=false
# What is missing from this project's environment is in the engine's.

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file

from plugins.publishing import PublishFailed
from plugins.weights_filesystem.trainer import FilesystemPublisher

SHARED = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4)
WEIGHTS = {
    "shared": SHARED,
    "tied": SHARED,
    "row": SHARED[1],
    "transposed": torch.arange(10, dtype=torch.float32).reshape(2, 5).t(),
    "scalar": torch.tensor(7, dtype=torch.int64),
    "parameter": torch.nn.Parameter(torch.ones(2)),
}


class Writer(FilesystemPublisher):
    """Notes what lies there when headrace is asked."""

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__("http://nowhere", folder, **options)
        self.asked: list[Any] = []
        self.failing = False

    def _ask(self, version: str | int, **options: Any) -> Any:
        path = Path(options["path"])
        self.asked.append([str(version), path.name, sorted(file.name for file in path.iterdir())])

        def wait() -> None:
            if self.failing:
                raise PublishFailed("no worker has it")

        return SimpleNamespace(wait=wait)


def versions(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def main(folder: Path) -> dict[str, Any]:
    """Play it through."""
    came: dict[str, Any] = {}
    writer = Writer(folder / "a")
    writer.publish(WEIGHTS, 1)
    read = load_file(folder / "a" / "version-1" / "model.safetensors")
    came["whole"] = {name: bool(read[name].dtype == tensor.dtype and read[name].equal(tensor.detach())) for name, tensor in WEIGHTS.items()}
    for version in (2, "3.rc-1"):
        writer.publish(WEIGHTS, version)
    came["asked"], came["kept"] = list(writer.asked), versions(folder / "a")
    writer.failing = True
    try:
        writer.publish(WEIGHTS, 4)
    except PublishFailed:
        came["kept while it fails"] = versions(folder / "a")
    writer.failing = False
    writer.publish({"other": torch.zeros(1)}, 4)
    came["again"] = [list(load_file(folder / "a" / "version-4" / "model.safetensors")), versions(folder / "a")]
    came["refused"] = []
    for version in ("../5", "", "a b", ".5"):
        try:
            writer.publish(WEIGHTS, version)
        except ValueError as error:
            came["refused"].append(str(error))
    alone = Writer(folder / "b", keep=0)
    for version in (1, 2):
        alone.publish(WEIGHTS, version)
    came["alone"] = versions(folder / "b")
    return came


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))), flush=True)
