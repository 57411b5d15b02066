"""The folder that holds the real workers, and its rule: a component is there when its stamp says so.

A component is a subfolder. Its stamp is written last and names the recipe; without the right stamp the folder is a remnant of a
broken or an older installation, and is made anew. Only one process at a time installs a component; others wait for it.
"""

import contextlib
import fcntl
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

_STAMP = "stamp.json"


def root() -> Path:
    """`$HEADRACE_REAL_WORKERS`, or `~/.cache/headrace/real-workers`."""
    configured = os.environ.get("HEADRACE_REAL_WORKERS")
    return Path(configured).expanduser().resolve() if configured else Path.home() / ".cache" / "headrace" / "real-workers"


def is_installed(name: str, recipe: object) -> bool:
    """Whether the component is there, made by this recipe (anything that JSON can say)."""
    try:
        stamp = json.loads((root() / name / _STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return stamp == recipe


def ensure(name: str, recipe: object, install: Callable[[Path], None]) -> Path:
    """Return the component's folder, after `install` has filled it if need be.

    Raises: whatever `install` raises; the folder has no stamp then, and the next call starts over.
    """
    folder = root() / name
    if is_installed(name, recipe):
        return folder
    with _lock(name):
        if not is_installed(name, recipe):
            progress(f"installing {name} into {folder}")
            started = time.monotonic()
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            install(folder)
            _write_stamp(folder, recipe)
            progress(f"installed {name} in {time.monotonic() - started:.0f} s")
    return folder


def progress(text: str) -> None:
    """Say what goes on, on standard error."""
    print(f"[real-workers] {text}", file=sys.stderr, flush=True)


def _write_stamp(folder: Path, recipe: object) -> None:
    partial = folder / (_STAMP + ".partial")
    partial.write_text(json.dumps(recipe, indent=1) + "\n", encoding="utf-8")
    partial.replace(folder / _STAMP)


@contextlib.contextmanager
def _lock(name: str) -> Iterator[None]:
    root().mkdir(parents=True, exist_ok=True)
    with (root() / f"{name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"another process is installing {name}; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
