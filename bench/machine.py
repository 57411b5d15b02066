"""The machine and the versions that a result belongs to."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tests.workers.install import SERVER_VERSION

_PACKAGES = ("headrace", "hypercorn", "trio", "h2", "protobuf", "msgspec", "pluggy", "quart-trio")


def facts() -> dict[str, str]:
    """Names and values, all text; the load average is that of the last minute before the measurement."""
    return {
        "cpu": _cpu_model(),
        "cores": str(os.cpu_count()),
        "load average": f"{os.getloadavg()[0]:.2f}",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "commit": _commit(),
        "vllm-rs": SERVER_VERSION,
        **{package: _version(package) for package in _PACKAGES},
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    answer = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return answer.stdout.strip() or "unknown"
