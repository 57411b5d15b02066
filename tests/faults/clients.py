"""Clients for the faults: bodies of calls, raw connections that can be cut anywhere, and one that lives in a process of its own."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from tests.proxy import RunningProxy

PATH = "/inference/v1/generate"

_CLIENT = """
import socket, sys
data = sys.stdin.buffer.read()
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as connection:
    connection.sendall(data)
    print("sent", flush=True)
    while received := connection.recv(65536):
        print("received", flush=True)
"""


def body(prompt: Iterable[int], tokens: int, *, stream: bool = False, **sampling: Any) -> dict[str, Any]:
    """A greedy call for exactly so many tokens."""
    return {
        "token_ids": list(prompt),
        "sampling_params": {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True} | sampling,
        "stream": stream,
    }


def raw(sent: dict[str, Any], request_id: str = "") -> bytes:
    """A call as the bytes of an HTTP/1.1 request."""
    data = json.dumps(sent).encode()
    named = f"x-request-id: {request_id}\r\n" if request_id else ""
    return f"POST {PATH} HTTP/1.1\r\nhost: test\r\n{named}content-length: {len(data)}\r\n\r\n".encode() + data


def call(proxy: RunningProxy, sent: dict[str, Any]) -> httpx.Response:
    """The response to a call, of its own connection."""
    return httpx.post(f"{proxy.url}{PATH}", json=sent, timeout=60, trust_env=False)


def tokens_of(response: httpx.Response) -> list[int]:
    """The output in a response, streamed or not."""
    if response.headers["content-type"] == "application/json":
        return response.json()["choices"][0]["token_ids"]
    return [token for chunk in chunks_of(response) for choice in chunk["choices"] for token in choice["token_ids"]]


def chunks_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a streamed response; it must be complete."""
    *blocks, done, end = response.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(block.removeprefix("data: ")) for block in blocks if not block.startswith(":")]


class ClientProcess:
    """A client that does one call, to be killed."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        assert process.stdout is not None
        self._output = process.stdout

    def wait_for(self, word: str) -> None:
        """Return when it has said `sent`, or `received` for the first bytes of the response."""
        while (line := self._output.readline().decode().strip()) != word:
            assert line, f"the client ended and never said {word!r}"

    def kill(self) -> None:
        """As the kernel does it when memory is short."""
        os.kill(self._process.pid, signal.SIGKILL)


@contextmanager
def client_process(proxy: RunningProxy, data: bytes) -> Iterator[ClientProcess]:
    """A process that sends these bytes and reads what comes."""
    with subprocess.Popen([sys.executable, "-c", _CLIENT, str(proxy.port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.write(data)
        process.stdin.close()
        try:
            yield ClientProcess(process)
        finally:
            process.kill()


def read_until(connection: socket.socket, end: bytes) -> bytes:
    """What comes, up to and with `end`."""
    data = b""
    while end not in data:
        received = connection.recv(65536)
        assert received, f"closed before {end!r}: {data!r}"
        data += received
    return data
