"""A service as the server has it: what its handlers raise becomes the status that vLLM answers."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from grpclib.const import Handler, Status
from grpclib.exceptions import GRPCError
from grpclib.server import Stream

from plugins.stand_in.engine.refusal import Problem, Refused

STATUSES = {
    Problem.INVALID: Status.INVALID_ARGUMENT,
    Problem.NOT_FOUND: Status.NOT_FOUND,
    Problem.ALREADY_EXISTS: Status.ALREADY_EXISTS,
    Problem.PRECONDITION: Status.FAILED_PRECONDITION,
    Problem.UNAVAILABLE: Status.UNAVAILABLE,
    Problem.INTERNAL: Status.INTERNAL,
}

_Stream = Stream[Any, Any]


class Servable(Protocol):
    """What grpclib serves: a mapping of rpc paths to handlers."""

    def __mapping__(self) -> Mapping[str, Handler]:
        """The rpcs by path."""
        ...


class Service:
    """A service whose handlers answer `Refused` with a status, and compressed messages with UNIMPLEMENTED."""

    def __init__(self, service: Servable) -> None:
        self._service = service
        self._handling = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def __mapping__(self) -> dict[str, Handler]:
        """The rpcs by path."""
        mapping = self._service.__mapping__()
        return {path: handler._replace(func=self._polite(handler.func)) for path, handler in mapping.items()}

    async def idle(self) -> None:
        """Wait until no call is being handled."""
        await self._idle.wait()

    def _polite(self, handle: Callable[[_Stream], Awaitable[None]]) -> Callable[[_Stream], Awaitable[None]]:
        async def handler(stream: _Stream) -> None:
            self._handling += 1
            self._idle.clear()
            try:
                await handle(stream)
            except Refused as refused:
                raise GRPCError(STATUSES[refused.problem], refused.message) from refused
            except NotImplementedError as error:
                # grpclib's way of saying that the message is compressed.
                raise GRPCError(Status.UNIMPLEMENTED, "compressed messages are not supported") from error
            finally:
                self._handling -= 1
                if not self._handling:
                    self._idle.set()

        return handler
