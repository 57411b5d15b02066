"""Workers whose processes headrace runs itself, for development and single nodes: `[[workers]] command`."""

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Final

import structlog
import trio
from msgspec import Struct

from core.fleet import keeper
from core.settings import WorkerSettings

log = structlog.stdlib.get_logger()

#: Between the end of a process and its next start, in seconds: twice as long each time, from the first to the last of these.
_SHORTEST: Final = 1.0
_LONGEST: Final = 60.0
#: A process that has run for so long, in seconds, starts a new row.
_LONG_ENOUGH: Final = 120.0
#: For the keeper, beyond the command's own time to stop.
_MARGIN: Final = 5.0


class Process(Struct):
    """What is known of a worker's process. `pid` is `None` while none runs."""

    #: Where what it prints is kept.
    output: str
    pid: int | None = None
    #: How often it was started.
    starts: int = 0
    #: Of the last one that has ended; 128 + N for signal N.
    status: int | None = None
    #: Why none runs.
    down: str = ""


class Managed:
    """Keeps a worker's process running. `ended` is told of each end, before the next start."""

    def __init__(self, settings: WorkerSettings, ended: Callable[[], None]) -> None:
        self._settings = settings
        self._ended = ended
        self.process = Process(output=settings.output or f"{settings.name}.log")

    async def run(self) -> None:
        """Start the process, and start it again whenever it ends.

        Cancellation: the process is stopped, first by SIGTERM and after `stop_timeout` by SIGKILL (shielded).
        """
        wait = _SHORTEST
        while True:
            started = trio.current_time()
            status = await self._once()
            if trio.current_time() - started > _LONG_ENOUGH:
                wait = _SHORTEST
            self.process.pid, self.process.status = None, status
            self.process.down = f"its process has ended with status {status}, see {self.process.output}; it starts again in {wait:g} s"
            log.error("worker.ended", worker=self._settings.name, status=status, output=self.process.output, again=wait)
            self._ended()
            await trio.sleep(wait)
            wait = min(2 * wait, _LONGEST)

    async def _once(self) -> int:
        """One process, from its start to its end."""
        grace = self._settings.stop_timeout
        command = [sys.executable, keeper.__file__, str(grace), self.process.output, *self._settings.command]
        environment = {**os.environ, **self._settings.environment}
        process = await trio.lowlevel.open_process(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
        )
        assert process.stdin
        assert process.stdout
        self.process.starts += 1
        try:
            self.process.pid = int(await process.stdout.receive_some() or 0) or None
            self.process.down = ""
            log.info("worker.started", worker=self._settings.name, pid=self.process.pid, output=self.process.output)
            return await process.wait()
        finally:
            with trio.CancelScope(shield=True):
                await process.stdin.aclose()  # that is how the keeper is told
                with trio.move_on_after(grace + _MARGIN):
                    await process.wait()
                if process.returncode is None:
                    process.kill()
                await process.stdout.aclose()
