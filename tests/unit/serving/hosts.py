"""`hosted_app` in a real server process: hypercorn's two workers, and `serve`."""

import os
import re
import signal
import socket
import struct
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import trio

ROOT = Path(__file__).parents[3]
HOSTS = ("hypercorn-asyncio", "hypercorn-trio", "serve")
#: For anything that happens at once when it works.
SOON = 20
_ADDRESS = re.compile(r"(?:Running|listening) on http://127\.0\.0\.1:(\d+)")


def command(host, *, graceful=10.0, port=0):
    if host == "serve":
        return [sys.executable, "-m", "tests.unit.serving.hosted_app", str(port), str(graceful)]
    worker = host.removeprefix("hypercorn-")
    bind = f"127.0.0.1:{port}"
    app = "tests.unit.serving.hosted_app"
    return [sys.executable, "-m", "hypercorn", "-k", worker, "--graceful-timeout", str(int(graceful)), "-b", bind, app]


class Host:
    """A running server: its address, its output line by line, its end."""

    def __init__(self, process):
        self.process = process
        self.output = ""
        self.port = 0
        self._closed = False
        self._more = trio.Event()

    async def read(self):
        async for data in self.process.stdout:
            self.output += data.decode()
            self._more.set()
            self._more = trio.Event()
        self._closed = True
        self._more.set()

    async def printed(self, pattern, count=1):
        """Wait until `pattern` is in the output `count` times; the last match."""
        with trio.fail_after(SOON):
            while len(found := list(re.finditer(pattern, self.output))) < count:
                assert not self._closed, f"ended without {pattern!r}:\n{self.output}"
                await self._more.wait()
        return found[count - 1]

    async def event(self, text, count=1):
        await self.printed(f"event: {re.escape(text)}\n", count)

    async def ended(self):
        """Wait for the process to end, and every child that holds its output; the exit code."""
        with trio.fail_after(SOON):
            code = await self.process.wait()
            while not self._closed:
                await self._more.wait()
        return code

    def terminate(self):
        self.process.send_signal(signal.SIGTERM)

    async def connect(self):
        return await trio.open_tcp_stream("127.0.0.1", self.port)

    async def request(self, path, *, keep_alive=True):
        """Send a GET on a connection of its own, and leave the answer to the caller."""
        stream = await self.connect()
        connection = "keep-alive" if keep_alive else "close"
        await stream.send_all(f"GET {path} HTTP/1.1\r\nhost: test\r\nconnection: {connection}\r\n\r\n".encode())
        return stream

    def client(self, **options):
        return httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", timeout=SOON, trust_env=False, **options)


async def receive_until(stream, end):
    """What arrives, up to and with `end`."""
    data = b""
    with trio.fail_after(SOON):
        while end not in data:
            received = await stream.receive_some()
            assert received, f"closed before {end!r}: {data!r}"
            data += received
    return data


async def reset(stream):
    """Close a connection with bytes unread, as a killed client does."""
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    await stream.aclose()


@asynccontextmanager
async def launched(arguments, env=None):
    """A server process with its output read; killed at the end if it still runs."""

    process = await trio.lowlevel.open_process(
        arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
        start_new_session=True,
    )
    host = Host(process)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(host.read)
        try:
            yield host
        finally:
            with trio.CancelScope(shield=True):
                if process.returncode is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    await process.wait()
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def running(host, **options):
    """`hosted_app` under the host of that name, answering requests."""
    async with launched(command(host, **options)) as server:
        server.port = int((await server.printed(_ADDRESS.pattern))[1])
        yield server
