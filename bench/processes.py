"""CPU time and memory of processes with all their descendants, from the kernel's own clocks and `/proc`."""

import ctypes
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)


def family(pids: Iterable[int]) -> list[int]:
    """The processes and their descendants, as they are now."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(FileNotFoundError, ProcessLookupError):
                # The command's name, in parentheses, may hold anything.
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = set(pids)
    while grown := {pid for pid, parent in parents.items() if parent in found and pid not in found}:
        found |= grown
    return sorted(found)


def cpu_seconds(pids: Iterable[int]) -> float:
    """User and system time of these processes so far, in nanosecond steps, with that of threads that have ended.

    Raises: `ProcessLookupError` when one of them is gone.
    """
    return sum(time.clock_gettime(_cpu_clock(pid)) for pid in pids)


def resident_bytes(pids: Iterable[int]) -> int:
    """Resident memory; pages that processes share count for each. Raises: `FileNotFoundError` when one of them is gone."""
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                total += int(line.split()[1]) * 1024
    return total


def _cpu_clock(pid: int) -> int:
    clock = ctypes.c_int()
    error = _libc.clock_getcpuclockid(pid, ctypes.byref(clock))
    if error:
        raise ProcessLookupError(error, f"process {pid} has no CPU clock")
    return clock.value
