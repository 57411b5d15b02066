"""Real gRPC servers for the channel to talk to, each in threads of its own: grpcio's and grpclib's."""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc
from grpclib.const import Cardinality, Handler
from grpclib.server import Server as GrpclibServer

UNLIMITED = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))


class Raw(bytes):
    """A message that is its bytes."""

    def SerializeToString(self) -> bytes:  # noqa: N802
        return bytes(self)

    @classmethod
    def FromString(cls, data: bytes) -> "Raw":  # noqa: N802
        return cls(data)


class Grpcio:
    """grpcio's threaded server with methods given as plain functions over bytes."""

    def __init__(self, methods: dict[str, Any], *, workers: int = 8, **options: Any) -> None:
        handlers = {f"/test.Test/{name}": handler for name, handler in methods.items()}

        class Generic(grpc.GenericRpcHandler):
            def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
                return handlers.get(handler_call_details.method)

        extra = tuple((f"grpc.{name}", value) for name, value in options.items())
        self.server = grpc.server(futures.ThreadPoolExecutor(workers), options=(*UNLIMITED, ("grpc.so_reuseport", 0), *extra))
        self.server.add_generic_rpc_handlers((Generic(),))
        self.port = 0

    def start(self, port: int = 0, credentials: grpc.ServerCredentials | None = None) -> int:
        address = f"127.0.0.1:{port}"
        if credentials is None:
            self.port = self.server.add_insecure_port(address)
        else:
            self.port = self.server.add_secure_port(address, credentials)
        self.server.start()
        return self.port

    def stop(self, grace: float | None = None) -> None:
        self.server.stop(grace).wait()


@contextmanager
def grpcio_server(
    methods: dict[str, Any],
    *,
    credentials: grpc.ServerCredentials | None = None,
    workers: int = 8,
    **options: Any,
) -> Iterator[Grpcio]:
    server = Grpcio(methods, workers=workers, **options)
    server.start(credentials=credentials)
    try:
        yield server
    finally:
        server.stop()


def unary(function: Callable[[bytes, grpc.ServicerContext], bytes]) -> Any:
    return grpc.unary_unary_rpc_method_handler(function)


def server_stream(function: Callable[[bytes, grpc.ServicerContext], Iterator[bytes]]) -> Any:
    return grpc.unary_stream_rpc_method_handler(function)


def client_stream(function: Callable[[Iterator[bytes], grpc.ServicerContext], bytes]) -> Any:
    return grpc.stream_unary_rpc_method_handler(function)


def both_streams(
    function: Callable[[Iterator[bytes], grpc.ServicerContext], Iterator[bytes]],
) -> Any:
    return grpc.stream_stream_rpc_method_handler(function)


ECHO = {
    "Echo": unary(lambda request, _: request),
    "Repeat": server_stream(lambda request, _: (request for _ in range(int(request)))),
    "Join": client_stream(lambda requests, _: b"".join(requests)),
    "Both": both_streams(lambda requests, _: (request for request in requests)),
}


class Service:
    """A grpclib service from coroutines that take grpclib's server stream."""

    def __init__(self, methods: dict[str, tuple[Callable[..., Any], Cardinality, type, type]]) -> None:
        self._methods = methods

    def __mapping__(self) -> dict[str, Handler]:
        return {name: Handler(*handler) for name, handler in self._methods.items()}


@contextmanager
def grpclib_server(*services: Any) -> Iterator[int]:
    """grpclib's own server on an asyncio loop in a thread; yields its port."""
    loop = asyncio.new_event_loop()
    listener = socket.create_server(("127.0.0.1", 0))

    async def start() -> GrpclibServer:
        server = GrpclibServer(list(services))  # belongs to the loop that runs when it's made
        await server.start(sock=listener)
        return server

    async def stop(server: GrpclibServer) -> None:
        server.close()
        await server.wait_closed()

    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        server = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
        yield listener.getsockname()[1]
        asyncio.run_coroutine_threadsafe(stop(server), loop).result(10)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
