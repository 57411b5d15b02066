"""Workers that come back and need something: the weights that the others have, or a resume that nobody else will send."""

import math

import structlog
import trio

from core.errors import CallError
from core.fleet.operations import Operation, Operations
from core.fleet.pausing import Pausing
from core.fleet.progress import UpdateRequest
from core.fleet.standings import Standings
from core.fleet.updates import Updates
from core.fleet.worker import Worker

log = structlog.stdlib.get_logger()


class Latecomers:
    """Brings up to date whom it can: by what has brought the others their weights, if that works without the trainer."""

    def __init__(self, standings: Standings, operations: Operations, pausing: Pausing, updates: Updates) -> None:
        self._standings = standings
        self._operations = operations
        self._pausing = pausing
        self._updates = updates
        self._send, self._receive = trio.open_memory_channel[Worker](math.inf)
        standings.needy = self._send.send_nowait

    async def run(self) -> None:
        """Care for whoever comes. Cancellation: updates go on for as long as `Updates.run` does."""
        async with trio.open_nursery() as nursery:
            async for worker in self._receive:
                nursery.start_soon(self._care_for, worker)

    async def _care_for(self, worker: Worker) -> None:
        while running := self._updates.running([worker]):
            await running[-1].done.wait()
        if not worker.is_there:  # it will come again
            return
        standing, current = self._standings.of(worker), self._standings.current.of(worker)
        if standing.late and current and current.transport and current.version is not None:
            request = UpdateRequest(current.version, current.transport, current.options)
            try:
                self._updates.ask(request, [worker], by="headrace", again=current.number)
            except CallError as error:  # the settings may be others now
                self._report(worker, error.message)
        elif standing.late:
            self._report(worker, standing.failed)
        elif standing.is_frozen:
            await self._operations.do("left_paused", [worker], lambda operation: self._resume(operation, worker), by="headrace")

    def _report(self, worker: Worker, reason: str) -> None:
        log.error("fleet.late", worker=worker.id, reason=reason, release=f"POST /fleet/workers/{worker.id}/release")

    async def _resume(self, operation: Operation, worker: Worker) -> None:
        """Those that were paused with it have gone on; or a headrace before this one has paused it, and ended before its weights came."""
        await self._pausing.go_on(operation, [worker])
