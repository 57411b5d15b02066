"""One process: several workers of one server would each have a fleet, a gate and an affinity of their own.

Updates would then pause half of the traffic. Until that state can be shared, a second worker refuses to start.

Servers start workers with `multiprocessing` under one parent, so that parent is the name under which a worker claims its place. The claim
is a socket in Linux's abstract namespace: bound by one process at a time, gone with it however it ends, and no file is left anywhere. A
worker that is started again (`--reload`, SIGHUP, a crash) finds the place free, since these servers wait for the old one's end.

Not seen: two servers on two ports, which is allowed; and servers that fork their workers without `multiprocessing` (gunicorn).
"""

import multiprocessing
import os
import socket
from pathlib import Path

_claims: list[socket.socket] = []


class SecondWorker(RuntimeError):
    """Another worker of the same server already runs headrace."""


def claim_process() -> None:
    """Claim the one place that a server has for headrace, until this process ends; without a parent server there is nothing to claim.

    Raises `SecondWorker` when a sibling has it.
    """
    parent = multiprocessing.parent_process()
    if parent is None or _claims:
        return
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        claim.bind(_place(parent.pid or os.getppid()))
    except OSError as error:
        claim.close()
        raise SecondWorker(
            f"another worker of this server (parent process {parent.pid}) already runs headrace, and workers can't share their state yet; "
            "run one worker (hypercorn: -w 1, the default)"
        ) from error
    _claims.append(claim)


def _place(parent: int) -> str:
    """Pids come again, and containers of one pod share the socket namespace: so the parent's start time and pid namespace belong to it."""
    started = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    namespace = Path("/proc/self/ns/pid").stat().st_ino
    return f"\0headrace/{namespace}/{parent}/{started}"
