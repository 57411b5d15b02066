"""Install the peers, each into an environment of its own below `$HEADRACE_BENCH_PEERS` (default `~/.cache/headrace/bench-peers`).

An environment is complete when its stamp is there; an interrupted installation starts over.
"""

import os
import shutil
import subprocess
import sys
from importlib.metadata import PathDistribution
from pathlib import Path

DYNAMO_VERSION = "1.6.1"
ROUTER_VERSION = "0.1.17"

# A simulator that neither the frontend nor the sidecar uses, and whose package index is often out of reach.
_DYNAMO_LEFT_OUT = ("aisimulate", "ai-dynamo-runtime")
_STAMP = "complete"


class NotInstalled(Exception):
    """A peer can't be had on this machine; the text says why."""


def dynamo() -> Path:
    """The environment with `ai-dynamo` and `ai-dynamo-runtime`, about 700 MB. Raises: `NotInstalled`."""
    folder = _root() / f"dynamo-{DYNAMO_VERSION}"
    if not (folder / _STAMP).exists():
        _make_environment(folder)
        _pip(folder, "--no-deps", f"ai-dynamo=={DYNAMO_VERSION}")
        (metadata,) = folder.glob("lib/python3*/site-packages/ai_dynamo-*.dist-info")
        _pip(folder, f"ai-dynamo-runtime=={DYNAMO_VERSION}", *_requirements(metadata))
        (folder / _STAMP).touch()
    return folder


def vllm_router() -> Path:
    """The environment with `vllm-router`, about 130 MB. Raises: `NotInstalled`."""
    folder = _root() / f"vllm-router-{ROUTER_VERSION}"
    if not (folder / _STAMP).exists():
        _make_environment(folder)
        _pip(folder, f"vllm-router=={ROUTER_VERSION}")
        (folder / _STAMP).touch()
    return folder


def _root() -> Path:
    configured = os.environ.get("HEADRACE_BENCH_PEERS")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "headrace" / "bench-peers"


def _requirements(metadata: Path) -> list[str]:
    return [
        requirement
        for requirement in PathDistribution(metadata).requires or []
        if "extra ==" not in requirement and not requirement.startswith(_DYNAMO_LEFT_OUT)
    ]


def _make_environment(folder: Path) -> None:
    print(f"installing {folder.name} into {folder}", file=sys.stderr, flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    _run([sys.executable, "-m", "venv", str(folder)], f"making an environment for {folder.name}")


def _pip(folder: Path, *packages: str) -> None:
    quiet = ["--quiet", "--no-input", "--disable-pip-version-check"]
    _run([str(folder / "bin" / "python"), "-m", "pip", "install", *quiet, *packages], f"installing {folder.name}")


def _run(command: list[str], what: str) -> None:
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode:
        lines = [line for line in answer.stderr.splitlines() if line.startswith("ERROR")] or answer.stderr.splitlines()[-1:]
        raise NotInstalled(f"{what} failed: {' '.join(lines)[:300]}")
