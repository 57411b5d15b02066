"""headrace in a process of its own, in front of workers: what a trainer would speak to.

`headrace()` is a context manager that blocks, as those of `tests.workers` do: from trio, use a fixture that isn't async, or a thread.
"""

import contextlib
import json
import os
import re
import signal
import socket
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from core import Role
from tests.workers import RunningWorker
from tests.workers.processes import Command, Processes

Host = Literal["serve", "hypercorn", "hypercorn-trio"]
Wires = Literal["both", "grpc", "http"]
T = TypeVar("T")

#: Every way to host it.
HOSTS: tuple[Host, ...] = ("serve", "hypercorn", "hypercorn-trio")
_ADDRESS = re.compile(r"(?:listening|Running) on http://127\.0\.0\.1:(\d+)")
_BINARIES = Path(sys.executable).parent
_READY_SECONDS = 60


@dataclass(frozen=True)
class RunningProxy:
    """A headrace that answers, with every worker ready."""

    port: int
    pid: int
    log: Path  #: what it printed: a JSON object a line, and what isn't its own
    processes: Processes

    @property
    def url(self) -> str:
        """Without a slash at the end."""
        return f"http://127.0.0.1:{self.port}"

    def fleet(self) -> list[dict[str, Any]]:
        """The workers, as `GET /fleet` shows them."""
        with urllib.request.urlopen(f"{self.url}/fleet", timeout=60) as reply:
            return json.load(reply)["workers"]

    def in_flight(self) -> int:
        """Calls that are on any worker."""
        return sum(worker["in_flight"] for worker in self.fleet())

    def states(self) -> dict[str, str]:
        """The state of each worker, by its id."""
        return {worker["id"]: worker["state"] for worker in self.fleet()}

    def settled(self, call: str) -> dict[str, Any]:
        """The event with which the call of this id settled; waits for it.

        Raises: `TimeoutError`.
        """
        return wait_for(lambda: next((event for event in self.events("call.settled") if event["id"] == call), None))

    def events(self, name: str) -> list[dict[str, Any]]:
        """The events of that name in its log."""
        lines = self.log.read_text(encoding="utf-8").splitlines()
        events = (json.loads(line) for line in lines if line.startswith("{") and line.endswith("}"))
        return [event for event in events if event["event"] == name]

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def ended(self, seconds: float = 20.0) -> int:
        """Wait for its end; the exit status.

        Raises: `TimeoutError`.
        """
        wait_for(self.processes.exit_statuses, seconds)
        return self.processes.exit_statuses()[0]

    def connect(self) -> socket.socket:
        """A raw connection. Reads give up after 30 seconds."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)


@contextlib.contextmanager
def headrace(
    *workers: RunningWorker,
    wires: Wires = "both",
    host: Host = "serve",
    settings: str = "",
    roles: Sequence[Role] = (),
    ready: bool = True,
) -> Iterator[RunningProxy]:
    """Run headrace in front of these workers; their ids are `w0`, `w1`, …

    `wires` are those that it is told of, `settings` more TOML, `roles` those of the workers, in turn; without, all are aggregated.
    With `ready` it has found every worker ready.

    Raises: `StartFailed`; `TimeoutError` when a worker doesn't get ready.
    """
    with tempfile.TemporaryDirectory(prefix="headrace-proxy-") as folder:
        config, log = Path(folder, "headrace.toml"), Path(folder, "headrace.log")
        sections = [
            _section(f"w{number}", worker, wires, roles[number] if roles else "aggregated") for number, worker in enumerate(workers)
        ]
        config.write_text("\n".join([*sections, '[log]\nformat = "json"', settings]), encoding="utf-8")
        environment = {"HEADRACE_CONFIG": str(config), "PYTHONUNBUFFERED": "1"}
        with Processes([Command(_command(host), log, environment)]) as processes:
            processes.wait_until(lambda: _port(log) is not None, _READY_SECONDS)
            proxy = RunningProxy(_port(log) or 0, processes.pids[0], log, processes)
            if ready:
                wait_for(lambda: set(proxy.states().values()) <= {"ready"}, _READY_SECONDS)
            yield proxy


def wait_for(condition: Callable[[], T | None], seconds: float = 10.0) -> T:
    """Ask until the answer is true, and return it. Blocks; from trio, call it in a thread.

    Raises: `TimeoutError` with the last answer.
    """
    deadline = time.monotonic() + seconds
    while not (answer := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"after {seconds:g} s it is still {answer!r}")
        time.sleep(0.02)
    return answer


def _section(name: str, worker: RunningWorker, wires: Wires, role: Role) -> str:
    lines = ["[[workers]]", f'id = "{name}"', f'role = "{role}"']
    if wires != "http":
        lines.append(f'grpc = "{worker.grpc}"')
    if wires != "grpc":
        lines.append(f'http = "{worker.http}"')
    return "\n".join(lines)


def _command(host: Host) -> list[str]:
    match host:
        case "serve":
            return [str(_BINARIES / "headrace"), "serve", "--port", "0"]
        case "hypercorn":
            return [str(_BINARIES / "hypercorn"), "--bind", "127.0.0.1:0", "core.app"]
        case "hypercorn-trio":
            return [str(_BINARIES / "hypercorn"), "--worker-class", "trio", "--bind", "127.0.0.1:0", "core.app"]


def _port(log: Path) -> int | None:
    found = _ADDRESS.search(log.read_text(encoding="utf-8")) if log.exists() else None
    return int(found[1]) if found else None
