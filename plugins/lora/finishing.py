"""Operations that go on to their end when the client that asked for them is gone."""

import math
from collections.abc import Awaitable, Callable

import structlog
import trio

log = structlog.stdlib.get_logger()


class Finisher:
    """Runs operations in a nursery of its own, for as long as `run` does."""

    def __init__(self) -> None:
        self._send, self._receive = trio.open_memory_channel[Callable[[], Awaitable[None]]](math.inf)

    async def run(self) -> None:
        """Run what is started. Cancellation ends it, and every operation where it stands."""
        async with trio.open_nursery() as nursery:
            async for operation in self._receive:
                nursery.start_soon(operation)

    async def finish(self, operation: Callable[[], Awaitable[None]]) -> None:
        """Run an operation and wait for it.

        Cancellation: the operation goes on alone.
        Raises: what it raises.
        """
        done = trio.Event()
        failures: list[Exception] = []

        async def run() -> None:
            try:
                await operation()
            except Exception as error:  # noqa: BLE001 - raised again by whoever waits
                failures.append(error)
            done.set()

        self._send.send_nowait(run)
        await done.wait()
        for failure in failures:
            raise failure

    def start(self, operation: Callable[[], Awaitable[None]]) -> None:
        """Run an operation for which nobody waits; what it raises is logged."""

        async def run() -> None:
            try:
                await operation()
            except Exception:
                log.exception("lora.unfinished")

        self._send.send_nowait(run)
