"""A request that a worker's HTTP server gets as it is, and the answer, whose bytes nobody reads."""

from collections.abc import AsyncGenerator, Collection, Iterable
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from typing import Final

import httpx
import trio
from msgspec import Struct

from core.errors import BadRequest, WorkerLost
from core.wire.beginnings import has_begun
from core.wire.http_errors import describe, key_refused
from core.wire.http_lane import close_connection

Headers = list[tuple[bytes, bytes]]

#: Headers of one connection (RFC 9110, section 7.6.1).
_OF_A_CONNECTION: Final = frozenset(
    (
        *(b"connection", b"keep-alive", b"proxy-connection", b"proxy-authenticate", b"proxy-authorization"),
        *(b"te", b"trailer", b"transfer-encoding", b"upgrade"),
    )
)
#: A request's that each side writes itself; `expect` is met, since the body is here.
_OF_A_REQUEST: Final = frozenset((b"host", b"content-length", b"expect", b"authorization"))
_EVENTS: Final = b"text/event-stream"
_OF_A_RESPONSE: Final = frozenset((b"date", b"server"))


class RelayedRequest(Struct, frozen=True):
    """What a client sent, without its body. `target` is the path with the query."""

    method: str
    target: bytes
    headers: Headers


class Answer:
    """A response that has begun; see `ask`."""

    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        self._pieces = response.aiter_raw()
        self._first: bytes | None = None
        self.status = response.status_code
        #: Names in lower case, without those of the connection. The body's length is among them when the worker knew it.
        self.headers = _end_to_end(response.headers.raw, _OF_A_RESPONSE)

    @property
    def is_events(self) -> bool:
        """Whether these are server-sent events that can be read."""
        headers = dict(self.headers)
        return headers.get(b"content-type", b"").startswith(_EVENTS) and b"content-encoding" not in headers

    async def start(self) -> None:
        """Wait for the first bytes with which an answer has begun, or the end. Raises: `WorkerLost`, `WorkerPaused`."""
        first, begun, events = b"", False, self.is_events
        while not begun:
            data = await self._receive()
            first += data
            begun = has_begun(first, status=self.status, events=events, ended=not data)
        self._first = first

    async def receive(self) -> bytes:
        """The next bytes as soon as they have come; none at the end.

        Cancellation: the answer is lost.
        Raises: `WorkerLost` when the worker is, before the end.
        """
        if self._first is not None:
            first, self._first = self._first, None
            return first
        return await self._receive()

    def release(self) -> None:
        """Close the connection at once, from any task, whatever the reader is doing. The worker sees its client go."""
        close_connection(self._response)

    async def aclose(self) -> None:
        """Leave what is unread; the connection is closed unless that is nothing. Cancellation: the same."""
        # httpx reads through nested generators; one that is left suspended would end when the garbage collector finds it. Reading on in
        # a scope whose time is up ends all of them.
        with trio.CancelScope(shield=True, deadline=trio.current_time()), suppress(httpx.HTTPError):
            async for _ in self._pieces:
                pass
        await self._response.aclose()

    async def _receive(self) -> bytes:
        try:
            return await anext(self._pieces, b"")
        except httpx.TransportError as error:
            raise _lost(error) from error


@asynccontextmanager
async def ask(client: httpx.AsyncClient, request: RelayedRequest, body: bytes) -> AsyncGenerator[Answer, None]:
    """Send a request to the worker of `client`; entering waits until an answer has begun, whatever its status.

    `Authorization` is the client's own, from the worker's settings, or none. So who could mend a 401 is whoever writes these: the worker
    is lost to this request.

    Cancellation, and leaving before the end: the connection is closed, by which the worker knows.
    Raises: `WorkerLost`; `WorkerPaused`, see `core.wire.beginnings`; `BadRequest` for what can't be sent on.
    """
    try:
        asked = httpx.Request(request.method, _url(client, request.target), headers=_headers(client, request.headers), content=body)
        response = await client.send(asked, stream=True)
    except (httpx.InvalidURL, httpx.LocalProtocolError) as error:
        raise BadRequest(f"this request can't be sent on to a worker: {error}") from error
    except httpx.TransportError as error:
        raise _lost(error) from error
    answer = Answer(response)
    try:
        if answer.status == HTTPStatus.UNAUTHORIZED:
            raise WorkerLost(key_refused(client))
        await answer.start()
        yield answer
    finally:
        await answer.aclose()


def _url(client: httpx.AsyncClient, target: bytes) -> httpx.URL:
    base = client.base_url
    return base.copy_with(raw_path=base.raw_path.rstrip(b"/") + target)


def _headers(client: httpx.AsyncClient, headers: Headers) -> Headers:
    # Not through `client.build_request`: what the client's defaults add (accept-encoding, cookies that another answer has set) isn't in
    # the request.
    kept = _end_to_end(headers, _OF_A_REQUEST)
    if key := client.headers.get("authorization"):
        kept.append((b"authorization", key.encode()))
    return kept


def _end_to_end(headers: Iterable[tuple[bytes, bytes]], own: Collection[bytes]) -> Headers:
    """The headers that are meant for the other end. A `connection` header names further ones that are not."""
    lowered = [(name.lower(), value) for name, value in headers]
    named = {token.strip().lower() for name, value in lowered if name == b"connection" for token in value.split(b",")}
    return [(name, value) for name, value in lowered if name not in _OF_A_CONNECTION and name not in own and name not in named]


def _lost(error: httpx.TransportError) -> WorkerLost:
    return WorkerLost(f"the worker's HTTP server was lost: {describe(error)}")
