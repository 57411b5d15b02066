"""grpclib's server, with the HTTP/2 settings of vLLM's and an end that closes what is open."""

import asyncio
from collections.abc import Collection
from contextlib import suppress
from typing import Any

import grpclib.server
from grpclib.config import Configuration
from grpclib.const import Cardinality, Handler, Status
from grpclib.exceptions import GRPCError
from grpclib.protocol import AbstractHandler, H2Protocol
from h2.config import H2Configuration
from h2.settings import SettingCodes

from plugins.stand_in.over_grpc.codec import Codec
from plugins.stand_in.over_grpc.service import Servable, Service

#: Of each stream and of the connection (vLLM 0.33).
WINDOW_BYTES = 1024 * 1024

_Stream = grpclib.server.Stream[Any, Any]


class Server(grpclib.server.Server):
    """A gRPC server for services that may raise `Refused`."""

    def __init__(self, services: Collection[Servable]) -> None:
        self._services = [Service(service) for service in services]
        super().__init__(
            self._services,
            codec=Codec(),
            config=Configuration(http2_connection_window_size=WINDOW_BYTES, http2_stream_window_size=WINDOW_BYTES),
        )
        self._mapping = _Mapping(self._mapping)
        self._connections = _Connections()

    def stop_accepting(self) -> None:
        """Close the listening socket; connections and calls go on."""
        assert self._server is not None
        self._server.close()

    async def end(self, patience: float) -> None:
        """Let the calls end by themselves for `patience` seconds, then cancel them; close the connections."""
        with suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await asyncio.gather(*(service.idle() for service in self._services))
        self.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await self._connections.close()

    def _protocol_factory(self) -> H2Protocol:
        protocol = super()._protocol_factory()
        return _Connection(self._connections, protocol.handler, protocol.config, protocol.h2_config)


class _Connections:
    """The open connections: grpclib forgets them, and leaves them open at the end."""

    def __init__(self) -> None:
        self.open: set[_Connection] = set()
        self.closed = asyncio.Event()

    async def close(self) -> None:
        for connection in self.open:
            connection.say_goodbye()
        while self.open:
            self.closed.clear()
            await self.closed.wait()


class _Connection(H2Protocol):
    """A connection on which the client may open any number of streams: vLLM announces no limit, `h2` announces 100."""

    def __init__(self, connections: _Connections, handler: AbstractHandler, config: Configuration, h2_config: H2Configuration) -> None:
        super().__init__(handler, config, h2_config)
        self._connections = connections

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._connections.open.add(self)
        self.connection._connection.update_settings({SettingCodes.MAX_CONCURRENT_STREAMS: 2**31 - 1})
        self.connection.flush()

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._connections.open.discard(self)
        self._connections.closed.set()

    def say_goodbye(self) -> None:
        """Send GOAWAY and close, once what was written before is out."""
        self.connection._connection.close_connection()
        self.connection.flush()
        self.connection.close()


class _Mapping(dict[str, Handler]):
    """Has a handler for every path: grpclib's own answer to an unknown one lacks the content type that clients demand."""

    def get(self, key: str, default: Handler | None = None) -> Handler:  # type: ignore[override]
        return super().get(key, default or Handler(_unimplemented, Cardinality.UNARY_UNARY, bytes, bytes))


async def _unimplemented(_stream: _Stream) -> None:
    raise GRPCError(Status.UNIMPLEMENTED)
