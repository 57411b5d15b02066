"""Clients that others wrote, each in an environment of its own, so that what they need never meets what we need.

`prime_rl` installs the packages behind Prime-RL's rollouts (about 0.9 GB a version, in half a minute) beside the real workers, and
`roll_out` has them make some; see `prime_rollouts.py` for the order and for what comes back.
"""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final, Literal

from tests.workers import InstallFailed, cache

PrimeRelease = Literal["reference", "newest"]

#: `reference` writes the salt into `sampling_params`, as Prime-RL 0.8 does; `newest` at the top of the body.
PRIME_RL: Final[dict[PrimeRelease, dict[str, str]]] = {
    "reference": {"verifiers": "0.3.1", "renderers": "0.1.10"},
    "newest": {"verifiers": "0.4.0", "renderers": "0.1.12"},
}
_ROLLOUTS: Final = Path(__file__).with_name("prime_rollouts.py")


def why_not(release: PrimeRelease) -> str | None:
    """Why Prime-RL's packages can't be had on this machine; `None` when they can, be it after a download."""
    return None if cache.is_installed(*_component(release)) else _why_no_download(PRIME_RL[release]["verifiers"])


def prime_rl(release: PrimeRelease) -> Path:
    """Return the interpreter of the environment with Prime-RL's packages, installed if need be.

    Raises: `InstallFailed`.
    """
    name, recipe = _component(release)
    return cache.ensure(name, recipe, functools.partial(_install, PRIME_RL[release])) / "bin" / "python"


def roll_out(release: PrimeRelease, order: dict[str, Any], *, seconds: float = 120.0) -> dict[str, list[dict[str, Any]]]:
    """Make the rollouts and evaluations that are ordered, and return what came of each.

    Blocks; from trio, call it in a thread.

    Raises: `AssertionError` with what it printed when the client fails; `subprocess.TimeoutExpired` after `seconds`.
    """
    done = subprocess.run(
        [prime_rl(release), _ROLLOUTS], input=json.dumps(order), capture_output=True, text=True, timeout=seconds, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _component(release: PrimeRelease) -> tuple[str, object]:
    versions = PRIME_RL[release]
    return f"verifiers-{versions['verifiers']}", versions


def _install(versions: dict[str, str], folder: Path) -> None:
    packages = [f"{name}=={version}" for name, version in versions.items()]
    pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    for command in ([sys.executable, "-m", "venv", "--clear", folder], [*pip, *packages]):
        answer = _run([str(argument) for argument in command])
        if answer.returncode:
            raise InstallFailed(f"{' '.join(packages)}: {answer.stderr.strip()[-2000:]}")


@functools.cache
def _why_no_download(version: str) -> str | None:
    answer = _run([sys.executable, "-m", "pip", "index", "versions", "verifiers", "--retries", "1", "--timeout", "15"])
    return None if version in answer.stdout else f"pip can't find verifiers {version} here"


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), check=False)
