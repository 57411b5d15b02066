"""Run a stand-in worker as a process of its own, for as long as a block of code lasts."""

import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec
import trio

#: Seconds until the ready line must have come: it takes about one, on a busy machine several.
START_DEADLINE = 30.0

#: Seconds that the process may take to end by itself.
STOP_DEADLINE = 3.0


@dataclass(frozen=True)
class StandInAddress:
    """Where a running stand-in can be reached."""

    host: str
    grpc_port: int
    http_port: int
    pid: int

    @property
    def grpc(self) -> str:
        """`host:port` of the gRPC server."""
        return f"{self._name}:{self.grpc_port}"

    @property
    def http(self) -> str:
        """Base URL of the HTTP server, without a slash at the end."""
        return f"http://{self._name}:{self.http_port}"

    @property
    def _name(self) -> str:
        return f"[{self.host}]" if ":" in self.host else self.host


class StandInFailed(Exception):
    """The process ended, or said nothing, before it was ready. The message has its exit status."""


@asynccontextmanager
async def stand_in_process(*arguments: str) -> AsyncIterator[StandInAddress]:
    """Start `python -m plugins.stand_in` with command-line `arguments`; yield when both its ports are open.

    The process ends with the block, and with this process if that dies: first by SIGTERM, after `STOP_DEADLINE` by SIGKILL. What it
    logs goes to our stderr.

    Raises `StandInFailed` when it isn't ready within `START_DEADLINE`.

    Cancellation: the process is ended all the same (shielded, within the deadline), and then the cancellation goes on.
    """
    command = [sys.executable, "-m", "plugins.stand_in", "--exit-with-parent", *arguments]
    process = await trio.lowlevel.open_process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield await _ready(process)
    finally:
        with trio.CancelScope(shield=True):
            await _stop(process)


async def _ready(process: trio.Process) -> StandInAddress:
    assert process.stdout is not None
    line = b""
    with trio.move_on_after(START_DEADLINE):
        while not line.endswith(b"\n"):
            received = await process.stdout.receive_some()
            if not received:
                status = await process.wait()
                raise StandInFailed(f"the stand-in worker ended with status {status} before it was ready")
            line += received
    if not line.endswith(b"\n"):
        raise StandInFailed(f"the stand-in worker was not ready within {START_DEADLINE:g} s")
    return msgspec.json.decode(line, type=StandInAddress)


async def _stop(process: trio.Process) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.terminate()
    with trio.move_on_after(STOP_DEADLINE):
        await process.wait()
    if process.returncode is None:
        process.kill()
        await process.wait()
    await process.stdin.aclose()
    await process.stdout.aclose()
