"""Start a worker's processes, wait until they serve, and end them all."""

import json
import os
import select
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

_SUPERVISE = Path(__file__).with_name("supervise.py")
_TAIL_LINES = 30


class StartFailed(Exception):
    """A worker did not come up; the text ends with the last lines of its logs."""


@dataclass(frozen=True)
class Command:
    """One process: what to run, with which environment on top of ours, and the file for everything that it prints."""

    argv: Sequence[str | Path]
    log: Path
    environment: Mapping[str, str]


class Processes:
    """Processes that end together: when the context ends, and also when this process dies in whatever way."""

    def __init__(self, commands: Sequence[Command]) -> None:
        self._commands = commands
        self.exited: dict[int, int] = {}
        self.pids: tuple[int, ...] = ()

    def __enter__(self) -> Self:
        # A session of its own: an interrupt at the terminal must reach the tests first, and the workers through them.
        # Unbuffered, so that `select` knows about every report that wasn't read yet.
        self._supervisor = subprocess.Popen(
            [sys.executable, "-I", _SUPERVISE], bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        assert self._supervisor.stdin is not None
        assert self._supervisor.stdout is not None
        self._orders, self._reports = self._supervisor.stdin, self._supervisor.stdout
        commands = [
            {
                "argv": [str(argument) for argument in command.argv],
                "environment": os.environ | command.environment,
                "log": str(command.log),
            }
            for command in self._commands
        ]
        self._orders.write(json.dumps({"commands": commands}).encode() + b"\n")
        self.pids = tuple(json.loads(self._reports.readline())["pids"])
        return self

    def __exit__(self, *_: object) -> None:
        self._orders.close()
        self._supervisor.wait()
        self._reports.close()

    def wait_until(self, ready: Callable[[], bool], timeout: float) -> None:
        """Wait until `ready()` is true.

        Raises: `StartFailed` when a process ends before, or after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while not ready():
            self._read_reports()
            for index, status in self.exited.items():
                name = Path(self._commands[index].argv[0]).name
                raise StartFailed(f"{name} ended with status {status} before it was ready\n{self._tails()}")
            if time.monotonic() > deadline:
                raise StartFailed(f"not ready after {timeout:.0f} s\n{self._tails()}")
            time.sleep(0.05)

    def exit_statuses(self) -> dict[int, int]:
        """The exit statuses of those that have ended, by the number of their command; minus the signal for those it ended."""
        self._read_reports()
        return self.exited

    @property
    def supervisor_pid(self) -> int:
        """The process between us and `pids`."""
        return self._supervisor.pid

    def _read_reports(self) -> None:
        while select.select([self._reports], [], [], 0)[0] and (line := self._reports.readline()):
            report = json.loads(line)
            self.exited[report["exited"]] = report["status"]

    def _tails(self) -> str:
        def tail(log: Path) -> str:
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:] if log.exists() else []
            return "\n".join([f"--- {log}", *lines])

        return "\n".join(tail(command.log) for command in self._commands)


def free_ports(count: int) -> list[int]:
    """Return ports of 127.0.0.1 that nobody listened on a moment ago."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [bound.getsockname()[1] for bound in sockets]
    finally:
        for bound in sockets:
            bound.close()


def accepts(port: int) -> bool:
    """Whether somebody accepts connections at a port of 127.0.0.1."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def get(url: str) -> str | None:
    """Return the body of a successful GET; `None` when the server refuses, doesn't answer within 5 s, or isn't there."""
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.read().decode()
    except OSError:
        return None


def post(url: str, body: Any) -> None:
    """Post JSON.

    Raises: `ConnectionError` with the server's text when it refuses, or isn't there.
    """
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        urllib.request.urlopen(request, timeout=30).close()
    except urllib.error.HTTPError as refusal:
        with refusal:
            raise ConnectionError(f"{url}: {refusal.code} {refusal.read().decode(errors='replace')}") from refusal
    except OSError as error:
        raise ConnectionError(f"{url}: {error}") from error


def json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file with one JSON object a line, without a last line that isn't complete yet."""
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
