"""Modules of this project as processes in the engine's environment, which has torch and transformers."""

import os
from pathlib import Path
from typing import Any, Final

from tests.workers import components

_PROJECT: Final = Path(__file__).parents[2]


def in_engine(module: str, *arguments: object, nixl: bool = False) -> dict[str, Any]:
    """What `subprocess` has to know to run `python -m module` there, on one thread and with no hub; with `nixl` it has NIXL, too.

    Raises: `InstallFailed`.
    """
    path = [str(_PROJECT), str(components.nixl_packages())] if nixl else [str(_PROJECT)]
    variables = {"PYTHONPATH": os.pathsep.join(path), "PYTHONIOENCODING": "utf-8", "OMP_NUM_THREADS": "1"}
    quiet = {"HF_HUB_OFFLINE": "1", "NIXL_LOG_LEVEL": "WARN"}
    python = components.engine_environment() / "bin" / "python"
    return {"args": [str(python), "-m", module, *map(str, arguments)], "env": os.environ | variables | quiet, "cwd": _PROJECT}
