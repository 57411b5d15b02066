"""A worker's HTTP server over real sockets that does, byte for byte, what a script says."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from functools import partial

import h11
import httpx
import trio
from msgspec import Struct

from core.fleet.worker import Worker
from tests.unit.core.rig import make_worker


class Gone:
    """In a script: wait until the client has closed its connection."""


class Abort:
    """In a script: close the connection here. Without it, it is kept for the next request."""


GONE, ABORT = Gone(), Abort()
#: Bytes are sent, an event is waited for.
Step = bytes | trio.Event | Gone | Abort


class Received(Struct):
    """A request as it came."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes

    def values(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key == name]


class Upstream:
    """Request number k, over all connections, is answered by script number k; the last script is for all that come after."""

    def __init__(self, *scripts: Sequence[Step]) -> None:
        self._scripts = scripts
        self.requests: list[Received] = []
        self.connections = 0
        #: Set when a script has come to an end.
        self.done = trio.Event()

    async def handle(self, stream: trio.abc.Stream) -> None:
        self.connections += 1
        async with stream:
            while request := await _read(stream):
                self.requests.append(request)
                for step in self._scripts[min(len(self.requests), len(self._scripts)) - 1]:
                    match step:
                        case bytes():
                            await stream.send_all(step)
                        case trio.Event():
                            await step.wait()
                        case Abort():
                            return
                        case Gone():
                            await _wait_until_gone(stream)
                self.done.set()


@asynccontextmanager
async def upstream_worker(name: str, upstream: Upstream, *, key: str | None = None, prefix: str = "") -> AsyncGenerator[Worker, None]:
    """A ready worker whose HTTP server this is; `key` is what its settings name, `prefix` the path in its URL."""
    async with trio.open_nursery() as nursery:
        serve = partial(trio.serve_tcp, upstream.handle, 0, host="127.0.0.1")
        [listener] = await nursery.start(serve)
        url = f"http://127.0.0.1:{listener.socket.getsockname()[1]}{prefix}"
        headers = {"authorization": f"Bearer {key}"} if key else {}
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=None, trust_env=False) as client:
            worker = make_worker(name)
            worker.http = client
            yield worker
        nursery.cancel_scope.cancel()


def response(body: bytes, *headers: bytes, status: bytes = b"200 OK") -> bytes:
    """A whole response of a known length."""
    return b"\r\n".join([b"HTTP/1.1 " + status, b"content-length: %d" % len(body), *headers, b"", body])


def chunked(*headers: bytes) -> bytes:
    """The head of a response whose length isn't known."""
    return b"\r\n".join([b"HTTP/1.1 200 OK", b"transfer-encoding: chunked", *headers, b"", b""])


def chunk(data: bytes) -> bytes:
    """A piece of such a response; the last one is empty."""
    return b"%x\r\n%b\r\n" % (len(data), data)


async def _read(stream: trio.abc.Stream) -> Received | None:
    connection = h11.Connection(h11.SERVER)
    request: h11.Request | None = None
    body = b""
    while True:
        match connection.next_event():
            case h11.NEED_DATA:
                try:
                    connection.receive_data(bytes(await stream.receive_some()))
                except trio.BrokenResourceError:
                    return None
            case h11.Request() as request:
                pass
            case h11.Data(data=data):
                body += data
            case h11.EndOfMessage():
                assert request
                headers = [(name.decode(), value.decode("latin-1")) for name, value in request.headers]
                return Received(request.method.decode(), request.target.decode(), headers, body)
            case _:
                return None


async def _wait_until_gone(stream: trio.abc.Stream) -> None:
    try:
        while await stream.receive_some():
            pass
    except trio.BrokenResourceError:
        pass
