"""One stand-in process: the engine with both wires on one event loop, from the ready line to a graceful end."""

import asyncio
import os
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass

import msgspec
from hypercorn.asyncio import serve as serve_http
from hypercorn.config import Config

from plugins.stand_in.engine.engine import Engine
from plugins.stand_in.engine.refusal import Problem, Refused
from plugins.stand_in.kv_events import KVEventPublisher
from plugins.stand_in.options import Options
from plugins.stand_in.over_grpc.control import Control
from plugins.stand_in.over_grpc.health import Health
from plugins.stand_in.over_grpc.inference import Inference
from plugins.stand_in.over_grpc.server import Server
from plugins.stand_in.over_http.app import create_app
from plugins.stand_in.side_channel import start_side_channel

#: How long, in seconds, the last bytes of ended calls may take on their way out.
LAST_BYTES = 1.0

_BACKLOG = 1024


@dataclass(frozen=True)
class Ready:
    """Where a server listens: what its ready line says."""

    host: str
    grpc_port: int
    http_port: int
    pid: int


async def run(options: Options) -> None:
    """Be a worker process: `serve` until SIGTERM, SIGINT, `Control.Shutdown` or (with `exit_with_parent`) the end of stdin.

    One line of JSON on stdout, a `Ready`, says that both ports are open.
    """
    ending = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ending.set)
    if options.exit_with_parent:
        # A thread, because an event loop can't wait for every kind of file that stdin may be.
        threading.Thread(target=_read_to_the_end, args=(loop, ending.set), daemon=True).start()
    await serve(options, ending, _say)


async def serve(options: Options, ending: asyncio.Event, on_ready: Callable[[Ready], None]) -> None:
    """Serve both wires until `ending` is set; `on_ready` is called when both ports are open.

    At the end health says NOT_SERVING and its Watch streams end, new connections are no longer accepted, and running calls may go
    on for `shutdown_timeout` until they are ended with UNAVAILABLE.

    Raises OSError when a port can't be bound.
    """
    engine, health = Engine(options), Health()
    engine.scheduler.on_death(health.stop_serving)
    grpc = Server([Inference(engine), Control(engine, ending.set), health])
    with (
        _listen(options.host, options.grpc_port) as grpc_socket,
        _listen(options.host, options.http_port) as http_socket,
        _listen(options.host, options.side_channel_port) as side_socket,
    ):
        ready = Ready(options.host, grpc_socket.getsockname()[1], http_socket.getsockname()[1], os.getpid())
        handoffs = [rank.handoffs for rank in engine.ranks]
        async with asyncio.TaskGroup() as tasks, await start_side_channel(handoffs, side_socket), _publishing(engine):
            http = serve_http(create_app(engine), _http_config(http_socket, options), shutdown_trigger=ending.wait)
            tasks.create_task(http, name="http")
            await grpc.start(sock=grpc_socket)
            on_ready(ready)
            await ending.wait()
            health.leave()
            grpc.stop_accepting()
            await _drain(engine, options.shutdown_timeout)
            await grpc.end(LAST_BYTES)


@asynccontextmanager
async def _publishing(engine: Engine) -> AsyncIterator[None]:
    """Publish the KV events of each rank, if that is wanted."""
    config = engine.options.kv_events
    if config is None or not config.enable_kv_cache_events or config.publisher != "zmq":
        yield
        return
    with ExitStack() as publishers:
        for rank in engine.ranks:
            publisher = publishers.enter_context(KVEventPublisher(config, engine.options.host, rank.number))
            rank.prefix_cache.announce = publisher.publish
            rank.kv_events = publisher.config
        try:
            yield
        finally:
            for rank in engine.ranks:
                rank.prefix_cache.announce = None


async def _drain(engine: Engine, shutdown_timeout: float) -> None:
    try:
        async with asyncio.timeout(shutdown_timeout):
            await engine.scheduler.idle()
    except TimeoutError:
        engine.scheduler.end_all(Refused(Problem.UNAVAILABLE, "the server is shutting down"))


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol spelled out: asyncio and grpclib set TCP_NODELAY only then, and without it each reply takes 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _http_config(listener: socket.socket, options: Options) -> Config:
    config = Config()
    # hypercorn closes the descriptor that it is given.
    config.bind = [f"fd://{os.dup(listener.fileno())}"]
    config.loglevel = "WARNING"
    config.graceful_timeout = options.shutdown_timeout + LAST_BYTES
    return config


def _read_to_the_end(loop: asyncio.AbstractEventLoop, end: Callable[[], None]) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    loop.call_soon_threadsafe(end)


def _say(ready: Ready) -> None:
    sys.stdout.write(msgspec.json.encode(ready).decode() + "\n")
    sys.stdout.flush()
