"""A load generator that costs little: one thread, raw sockets, nothing parsed while the clock runs.

Each connection has one request in flight, and sends the next when the reply is complete (HTTP/1.1 keep-alive). Replies are kept whole;
`Reply.body` takes them apart afterwards.
"""

import select
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

_TIMEOUT = 120.0
_RECEIVE = 1 << 20
_LAST_CHUNK = b"0\r\n\r\n"


class LoadFailed(Exception):
    """The target refused a request, closed a connection, or doesn't answer; the text says which."""


@dataclass(frozen=True)
class Reply:
    """One reply: how long it took, in seconds, from sending the request to its last byte, and everything that came."""

    seconds: float
    raw: bytes

    def body(self) -> tuple[bytes, int]:
        """The body, and the number of chunks in which it was written (1 when it has a length)."""
        head, _, rest = self.raw.partition(b"\r\n\r\n")
        if b"transfer-encoding: chunked" not in head.lower():
            return rest, 1
        parts: list[bytes] = []
        position = 0
        while True:
            line_end = rest.index(b"\r\n", position)
            size = int(rest[position:line_end], 16)
            if not size:
                return b"".join(parts), len(parts)
            parts.append(rest[line_end + 2 : line_end + 2 + size])
            position = line_end + 2 + size + 2


@dataclass(frozen=True)
class Load:
    """What one run gave. `cpu_seconds` is the generator's own."""

    seconds: float
    cpu_seconds: float
    replies: Sequence[Reply]


def post(host: str, path: str, body: bytes) -> bytes:
    """A whole HTTP/1.1 request."""
    return f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def run(address: tuple[str, int], requests: Sequence[bytes], *, count: int, concurrency: int) -> Load:
    """Send `count` requests, the given ones in turn, over `concurrency` connections.

    Raises: `LoadFailed`.
    """
    supply = islice(cycle(requests), count)
    with _Connections(address, concurrency) as connections:
        cpu, started = time.thread_time(), time.perf_counter()
        replies = connections.exchange(supply)
        return Load(time.perf_counter() - started, time.thread_time() - cpu, replies)


class _Connections:
    def __init__(self, address: tuple[str, int], count: int) -> None:
        self._poll = select.epoll()
        self._connections: dict[int, _Connection] = {}
        self._address = address
        self._count = count

    def __enter__(self) -> "_Connections":
        for _ in range(self._count):
            try:
                sock = socket.create_connection(self._address, timeout=_TIMEOUT)
            except OSError as error:
                raise LoadFailed(f"no connection to {self._address[0]}:{self._address[1]}: {error}") from error
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._connections[sock.fileno()] = _Connection(sock)
            self._poll.register(sock, select.EPOLLIN)
        return self

    def __exit__(self, *_: object) -> None:
        self._poll.close()
        for connection in self._connections.values():
            connection.close()

    def exchange(self, requests: Iterator[bytes]) -> list[Reply]:
        replies: list[Reply] = []
        busy = 0
        for connection in self._connections.values():
            if request := next(requests, None):
                connection.send(request)
                busy += 1
        while busy:
            ready = self._poll.poll(_TIMEOUT)
            if not ready:
                raise LoadFailed(f"no byte came for {_TIMEOUT:.0f} s")
            for descriptor, _ in ready:
                connection = self._connections[descriptor]
                reply = connection.receive()
                if reply is None:
                    continue
                replies.append(reply)
                if request := next(requests, None):
                    connection.send(request)
                else:
                    busy -= 1
        return replies


class _Connection:
    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._started = 0.0
        self._data = bytearray()
        #: the length of a complete reply; `None` when it is chunked, or not known yet
        self._expected: int | None = None
        self._chunked = False

    def send(self, request: bytes) -> None:
        self._data = bytearray()
        self._expected, self._chunked = None, False
        self._started = time.perf_counter()
        try:
            self._socket.sendall(request)
        except OSError as error:
            raise LoadFailed(f"sending a request failed: {error}") from error

    def receive(self) -> Reply | None:
        try:
            data = self._socket.recv(_RECEIVE)
        except OSError as error:
            raise LoadFailed(f"receiving a reply failed: {error}") from error
        if not data:
            raise LoadFailed(f"the connection was closed after {len(self._data)} bytes of a reply")
        self._data += data
        if self._expected is None and not self._chunked:
            self._read_head()
        if not (self._data.endswith(_LAST_CHUNK) if self._chunked else self._expected == len(self._data)):
            return None
        reply = Reply(time.perf_counter() - self._started, bytes(self._data))
        if not reply.raw.startswith(b"HTTP/1.1 200"):
            status, body = reply.raw[9 : reply.raw.index(b"\r\n")], reply.body()[0][:600]
            raise LoadFailed(f"{status.decode(errors='replace')}: {body.decode(errors='replace')}")
        return reply

    def close(self) -> None:
        self._socket.close()

    def _read_head(self) -> None:
        end = self._data.find(b"\r\n\r\n")
        if end < 0:
            return
        lines = bytes(self._data[:end]).lower().split(b"\r\n")
        headers = {name: value.strip() for name, _, value in (line.partition(b":") for line in lines)}
        if b"content-length" in headers:
            self._expected = end + 4 + int(headers[b"content-length"])
        else:
            self._chunked = True
