"""Run a worker's processes, and see to it that none survives whoever asked for them.

Started by `processes.py`, as a script. Reads one JSON line from standard input, `{"commands": [{"argv", "environment", "log"}]}`,
starts the commands, and answers `{"pids": [...]}`; whenever a command ends it writes `{"exited": index, "status": status}`. At the
end of its standard input (the parent closed it, or is dead) it ends all descendants, politely first, and exits.

Orphaned descendants become its children (Linux's child subreaper), so it finds those that a server has started, too. Should it be
killed itself, the kernel kills the commands.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_GRACE_SECONDS = 5.0

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Run until standard input ends."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)

    children = {_start(command): index for index, command in enumerate(json.loads(sys.stdin.readline())["commands"])}
    _say({"pids": list(children)})
    try:
        while True:
            readable, _, _ = select.select([sys.stdin, wake], [], [])
            if wake in readable:
                os.read(wake, 4096)
                _reap(children)
            if sys.stdin in readable and not sys.stdin.readline():
                return
    finally:
        _end_all()


def _start(command: dict[str, Any]) -> int:
    with Path(command["log"]).open("ab") as log:
        process = subprocess.Popen(
            command["argv"],
            env=command["environment"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=_die_with_parent,  # noqa: PLW1509 - this process has one thread
        )
    # Children are reaped by `_reap`, all of them; Popen must not try as well.
    process.returncode = 0
    return process.pid


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _reap(children: dict[int, int]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        if pid in children:
            _say({"exited": children[pid], "status": os.waitstatus_to_exitcode(status)})


def _end_all() -> None:
    for pid in _descendants():
        _signal(pid, signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_SECONDS
    while _descendants() and time.monotonic() < deadline:
        _reap({})
        time.sleep(0.02)
    while survivors := _descendants():
        for pid in survivors:
            _signal(pid, signal.SIGKILL)
        _reap({})
        time.sleep(0.02)


def _descendants() -> list[int]:
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # The command's name, in parentheses, may hold anything.
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if state != "Z":
                parents[int(entry.name)] = int(parent)
    found: list[int] = []
    generation = {os.getpid()}
    while generation:
        generation = {pid for pid, parent in parents.items() if parent in generation}
        found += generation
    return found


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _say(message: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main()
