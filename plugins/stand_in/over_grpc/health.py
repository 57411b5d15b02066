"""The health service: SERVING from the start, NOT_SERVING for good once the engine is dead or the server leaves."""

import asyncio
from collections.abc import AsyncIterator

from grpclib.const import Status
from grpclib.exceptions import GRPCError

from core.wire.generated.grpc.health.v1 import (
    HealthBase,
    HealthCheckRequest,
    HealthCheckResponse,
    HealthCheckResponseServingStatus,
)

#: What vLLM 0.33 answers for; any other name is NOT_FOUND, from Watch, too.
NAMES = ("", "vllm.Inference", "vllm.Control")

SERVING = HealthCheckResponseServingStatus.SERVING
NOT_SERVING = HealthCheckResponseServingStatus.NOT_SERVING


class Health(HealthBase):
    """One state for all names. Pause and sleep do not change it."""

    def __init__(self) -> None:
        self._status = SERVING
        self._leaving = False
        self._watches: set[asyncio.Event] = set()

    def stop_serving(self) -> None:
        """Say NOT_SERVING from now on."""
        self._status = NOT_SERVING
        self._tell()

    def leave(self) -> None:
        """Say NOT_SERVING, and end every Watch with OK."""
        self._leaving = True
        self.stop_serving()

    async def check(self, message: HealthCheckRequest) -> HealthCheckResponse:
        """The state now."""
        self._demand_known(message)
        return HealthCheckResponse(status=self._status)

    async def watch(self, message: HealthCheckRequest) -> AsyncIterator[HealthCheckResponse]:
        """The state now, and each later one."""
        self._demand_known(message)
        changed = asyncio.Event()
        self._watches.add(changed)
        try:
            while True:
                changed.clear()
                yield HealthCheckResponse(status=self._status)
                if self._leaving:
                    return
                await changed.wait()
        finally:
            self._watches.discard(changed)

    def _demand_known(self, message: HealthCheckRequest) -> None:
        if message.service not in NAMES:
            raise GRPCError(Status.NOT_FOUND, "service not registered")

    def _tell(self) -> None:
        for changed in self._watches:
            changed.set()
