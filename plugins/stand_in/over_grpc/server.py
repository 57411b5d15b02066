"""grpclib's server, with the manners of vLLM's: its limits, its error statuses, its HTTP/2 settings."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, Protocol, TypeVar, cast

import grpclib.server
from google.protobuf.message import DecodeError
from grpclib.config import Configuration
from grpclib.const import Handler, Status
from grpclib.encoding.proto import ProtoCodec
from grpclib.exceptions import GRPCError
from grpclib.protocol import H2Protocol
from h2.settings import SettingCodes

from plugins.stand_in.engine.refusal import Problem, Refused

#: A larger message is refused with OUT_OF_RANGE (vLLM 0.33).
MAX_MESSAGE_BYTES = 32 * 1024 * 1024

#: Of each stream and of the connection (vLLM 0.33).
WINDOW_BYTES = 1024 * 1024

STATUSES = {
    Problem.INVALID: Status.INVALID_ARGUMENT,
    Problem.NOT_FOUND: Status.NOT_FOUND,
    Problem.ALREADY_EXISTS: Status.ALREADY_EXISTS,
    Problem.PRECONDITION: Status.FAILED_PRECONDITION,
    Problem.UNAVAILABLE: Status.UNAVAILABLE,
    Problem.INTERNAL: Status.INTERNAL,
}

_Message = TypeVar("_Message")
_Stream = grpclib.server.Stream[Any, Any]


class Service(Protocol):
    """What grpclib serves: a mapping of rpc paths to handlers."""

    def __mapping__(self) -> Mapping[str, Handler]:
        """The rpcs by path."""
        ...


class Server(grpclib.server.Server):
    """A gRPC server for services that may raise `Refused`."""

    def __init__(self, services: Collection[Service]) -> None:
        self._services = [_Polite(service) for service in services]
        super().__init__(
            self._services,
            codec=_Codec(),
            config=Configuration(http2_connection_window_size=WINDOW_BYTES, http2_stream_window_size=WINDOW_BYTES),
        )

    def stop_accepting(self) -> None:
        """Close the listening socket; connections and calls go on."""
        assert self._server is not None
        self._server.close()

    async def end(self, patience: float) -> None:
        """Give the calls `patience` seconds to end by themselves, then cancel them."""
        handled = [service.idle() for service in self._services]
        try:
            async with asyncio.timeout(patience):
                await asyncio.gather(*handled)
        except TimeoutError:
            pass
        self.close()

    def _protocol_factory(self) -> H2Protocol:
        protocol = super()._protocol_factory()
        return _UnlimitedStreams(protocol.handler, protocol.config, protocol.h2_config)


class _UnlimitedStreams(H2Protocol):
    """A connection on which the client may open any number of streams: vLLM announces no limit, `h2` announces 100."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.connection._connection.update_settings({SettingCodes.MAX_CONCURRENT_STREAMS: 2**31 - 1})
        self.connection.flush()


class _Codec(ProtoCodec):
    def decode(self, data: bytes, message_type: type[_Message]) -> _Message:
        if len(data) > MAX_MESSAGE_BYTES:
            raise GRPCError(Status.OUT_OF_RANGE, f"the message has {len(data)} bytes, the limit is {MAX_MESSAGE_BYTES} bytes")
        try:
            return cast("_Message", super().decode(data, cast("Any", message_type)))
        except (DecodeError, ValueError, EOFError, IndexError) as error:
            raise GRPCError(Status.INTERNAL, f"failed to decode Protobuf message: {error}") from error


class _Polite:
    """A service whose handlers answer `Refused` with a status, and compressed messages with UNIMPLEMENTED."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._handling = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def __mapping__(self) -> dict[str, Handler]:
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
