"""Keeps the process of one managed worker, and sees to it that it doesn't outlive headrace: `python keeper.py GRACE OUTPUT COMMAND…`.

Runs alone, in a session of its own, with a pipe from headrace as its standard input. When that ends, because headrace has closed it or is
dead, the command and all that it has started get SIGTERM, and SIGKILL after GRACE seconds. What they print goes to the end of the file
OUTPUT; the command's process id goes to standard output, in a line. Ends with the command's status, 128 + N for signal N. Under Linux the
command gets SIGKILL when the keeper itself is killed, so that its port is free for the next one.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

#: Of Linux's prctl(2).
_PR_SET_PDEATHSIG: Final = 1


def main() -> int:
    """Run until the command has ended. Raises: `OSError` when it can't be started."""
    grace, output, *command = sys.argv[1:]
    with Path(output).open("ab") as log:
        process = subprocess.Popen(  # noqa: S603
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=_dying_with_us(),  # noqa: PLW1509 - no thread runs yet
        )
    print(process.pid, flush=True)  # noqa: T201
    ended = threading.Event()

    def follow() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        _signal(process.pid, signal.SIGTERM)
        if not ended.wait(float(grace)):
            _signal(process.pid, signal.SIGKILL)

    threading.Thread(target=follow, daemon=True).start()
    status = process.wait()
    ended.set()
    _signal(process.pid, signal.SIGKILL)  # what it has left behind
    return status if status >= 0 else 128 - status


def _dying_with_us() -> Callable[[], None] | None:
    """What binds the command to this thread's life, in its process before it begins; `None` where nothing can."""
    if sys.platform != "linux":
        return None
    prctl, keeper = ctypes.CDLL(None).prctl, os.getpid()

    def bind() -> None:
        prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
        if os.getppid() != keeper:  # it has died before that
            os.kill(os.getpid(), signal.SIGKILL)

    return bind


def _signal(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except OSError as error:
        print(error, file=sys.stderr)  # noqa: T201
        sys.exit(127)
