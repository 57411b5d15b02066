"""How a weight update goes, while it does: a bar for each worker on a terminal, a line for each change elsewhere."""

import shutil
import sys
from typing import Final, Literal, TextIO

from msgspec import Struct

Status = Literal["waiting", "paused", "applying", "done", "failed", "unchanged"]

_WIDTH: Final = 20
#: How far a worker has come, of `_WIDTH`.
_FILLED: Final[dict[Status, int]] = {"waiting": 0, "paused": 5, "applying": 10, "done": _WIDTH, "failed": _WIDTH, "unchanged": 0}


class WorkerProgress(Struct, frozen=True):
    """One worker in `GET /fleet/updates/<id>`."""

    status: Status
    reason: str = ""
    seconds: float | None = None

    def words(self) -> str:
        """The status, with the time or the reason that belongs to it."""
        if self.status == "done" and self.seconds is not None:
            return f"done in {self.seconds:.2f} s"
        return f"{self.status}: {self.reason}" if self.reason else self.status


class UpdateProgress(Struct, frozen=True):
    """`GET /fleet/updates/<id>`."""

    id: str
    version: str
    transport: str
    status: Literal["running", "succeeded", "failed"]
    phase: str
    workers: dict[str, WorkerProgress]
    seconds: float
    error: str | None = None


class Bars:
    """Draws the same lines again and again; never more than the terminal has."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._drawn = 0

    def show(self, update: UpdateProgress) -> None:
        """Draw the bars in the place of the last ones. When there are too many, those that are done go first."""
        columns, rows = shutil.get_terminal_size()
        order = sorted(update.workers, key=lambda id_: update.workers[id_].status == "done")
        shown = set(order[: max(rows - 3, 1)])
        width = max(map(len, update.workers), default=0)
        lines = [f"{id_:<{width}} {_bar(worker)} {worker.words()}" for id_, worker in update.workers.items() if id_ in shown]
        if hidden := len(update.workers) - len(lines):
            lines.append(f"… and {hidden} more")
        lines.append(f"{update.phase}, {update.seconds:.1f} s")
        up = f"\x1b[{self._drawn}A" if self._drawn else ""
        self._out.write(up + "".join(f"\x1b[2K{line[: columns - 1]}\n" for line in lines) + "\x1b[J")
        self._out.flush()
        self._drawn = len(lines)


class Lines:
    """Writes what has changed."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._phase = ""
        self._workers: dict[str, Status] = {}

    def show(self, update: UpdateProgress) -> None:
        """Write a line for the phase and for each worker, where they are other ones than the last time."""
        if update.phase != self._phase:
            self._phase = update.phase
            self._out.write(f"{update.seconds:.2f} s: {update.phase}\n")
        for id_, worker in update.workers.items():
            if worker.status != self._workers.get(id_):
                self._workers[id_] = worker.status
                self._out.write(f"{update.seconds:.2f} s: {id_}: {worker.words()}\n")
        self._out.flush()


def display(out: TextIO = sys.stdout) -> Bars | Lines:
    """What suits the output."""
    return Bars(out) if out.isatty() else Lines(out)


def _bar(worker: WorkerProgress) -> str:
    filled = _FILLED[worker.status]
    return f"[{('!' if worker.status == 'failed' else '#') * filled}{'-' * (_WIDTH - filled)}]"
