"""Requests that go to a worker's HTTP server as they are, and whose answers come back byte for byte.

They are placed, counted, settled and cancelled like any call; only lowering and lifting are missing.
"""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Final

import httpx

from core.call import Call
from core.errors import CallError, WorkerLost
from core.fleet.worker import Worker
from core.northbound.answering import answering, reply_headers, send_error
from core.northbound.headers import encode_headers
from core.path import Path
from core.routes import Exchange, HTTPRequest
from core.serving.client import Client
from core.wire.http_lane import close_connection

#: Headers of one connection (RFC 9110, section 7.6.1), and those that each side writes for itself.
_OWN: Final = frozenset(
    (
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding", "upgrade"),
        *("host", "content-length", "authorization", "date", "server"),
    )
)


class Relay:
    """Relays requests. The worker's own `Authorization` goes with them, never the client's."""

    def __init__(self, path: Path, *, stall_timeout: float) -> None:
        self._path = path
        self._stall_timeout = stall_timeout

    async def __call__(self, exchange: Exchange, call: Call, body: bytes) -> None:
        """Relay one request as `call`, with `body` in the place of its own, to the same path of a worker.

        Cancellation: the worker's connection is closed at once.
        Raises: `WorkerLost` when the worker is lost in the middle of its answer: only an end that isn't one tells the client so.
        """
        async with answering(self._path, call, exchange.receive, exchange.send, stall_timeout=self._stall_timeout) as (outcome, client):
            started = False
            try:
                async with self._path.relayed(call, outcome, lambda worker: _ask(worker, exchange.request, body)) as response:
                    client.release = lambda: close_connection(response)
                    started = True
                    await _pass_on(response, client, reply_headers(call, outcome))
                outcome.kind = "ok" if response.status_code < HTTPStatus.BAD_REQUEST else "refused"
                outcome.status = response.status_code
            except CallError as error:
                self._path.fail(call, outcome, error)
                if started:
                    raise
                await send_error(client.send, error, reply_headers(call, outcome))


async def _ask(worker: Worker, request: HTTPRequest, body: bytes) -> httpx.Response:
    assert worker.http is not None
    headers = {name: value for name, value in request.headers.items() if name not in _OWN}
    asked = worker.http.build_request(request.method, request.path, params=request.query or None, headers=headers, content=body)
    return await worker.http.send(asked, stream=True)


async def _pass_on(response: httpx.Response, client: Client, headers: Mapping[str, str]) -> None:
    kept = {name: value for name, value in response.headers.items() if name not in _OWN}
    await client.send({"type": "http.response.start", "status": response.status_code, "headers": encode_headers({**kept, **headers})})
    try:
        async for data in response.aiter_raw():
            await client.send({"type": "http.response.body", "body": data, "more_body": True})
    except httpx.TransportError as error:
        raise WorkerLost(f"the worker's HTTP server was lost in its answer: {error}") from error
    await client.send({"type": "http.response.body", "body": b"", "more_body": False})
