"""HTTP/1.1 of one connection, on h11. Takes and gives hypercorn's events of a connection, as hypercorn's own protocols do.

Hypercorn's HTTP/1.1 stands on h11, too, but has a layer of events more between it and ASGI, which is a fifth of what a small call costs.
This one knows no other protocol: an upgrade is not taken, and HTTP goes on, as HTTP has it.
"""

import math
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, Final, Protocol
from urllib.parse import unquote

import h11
import msgspec
import trio
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.trio.worker_context import WorkerContext

from core.errors import CallError, ShuttingDown
from core.serving.asgi import Message, Scope

#: An empty line before a request is nothing (RFC 9112, 2.2): some clients end a body with one.
_EMPTY_LINES: Final = b"\r\n"
#: Statuses whose responses have no body, whatever the handler sends.
_BODILESS: Final = frozenset({204, 304})
_DISCONNECT: Final = {"type": "http.disconnect"}
_END_OF_BODY: Final = {"type": "http.request", "body": b"", "more_body": False}

Address = tuple[str, int] | None
Put = Callable[[Message], Awaitable[None]]
AppSend = Callable[[Message | None], Awaitable[None]]
_Sent = h11.InformationalResponse | h11.Response | h11.Data | h11.EndOfMessage


class Answering(Protocol):
    """Who starts the handler of a request; what it returns takes the messages for the handler."""

    async def __call__(self, scope: Scope, send: AppSend, want: Callable[[], Awaitable[None]]) -> Put:
        """`send` takes the handler's messages, and `None` once it has ended; `want` is to be called when it first waits for the body."""
        ...


class HTTP1:
    """The protocol; `send` takes what it says to the connection."""

    def __init__(
        self,
        config: Config,
        context: WorkerContext,
        addresses: tuple[Address, Address],
        answer: Answering,
        send: Callable[[Event], Awaitable[None]],
    ) -> None:
        self._config = config
        self._context = context
        self._client, self._server = addresses
        self._answer = answer
        self._send = send
        self._h11 = self._fresh()
        #: Of the request that is answered; `None` between two.
        self._put: Put | None = None
        self._turn = object()
        self._head: Message = {}
        self._bodiless = False
        #: A request that was sent ahead waits for the one before.
        self._next = trio.lowlevel.ParkingLot()

    @property
    def unread(self) -> bool:
        """Whether the client may still be sending what nobody will read, if this is the end: the rest of a body, or no HTTP at all."""
        return self._h11.their_state in (h11.SEND_BODY, h11.ERROR)

    async def handle(self, event: Event) -> None:
        """Bytes that came, or the end of the connection."""
        if isinstance(event, RawData):
            data = event.data
            if data[:1] in (b"\r", b"\n") and self._h11.their_state is h11.IDLE and not self._h11.trailing_data[0]:
                data = data.lstrip(_EMPTY_LINES)
                if not data:
                    return
            self._h11.receive_data(data)
            await self._read()
        elif isinstance(event, Closed):
            await self._disconnect()

    async def _read(self) -> None:
        while True:
            try:
                event = self._h11.next_event()
            except h11.RemoteProtocolError as error:
                await self._refuse(_refusal(error.error_status_hint, self._config))
                return
            if isinstance(event, h11.Request):
                self._bodiless = event.method == b"HEAD"
                if refusal := _unserved(event):
                    await self._refuse(refusal)
                    return
                await self._begin(event)
            elif isinstance(event, h11.Data):
                await self._tell({"type": "http.request", "body": bytes(event.data), "more_body": True})
            elif isinstance(event, h11.EndOfMessage):
                await self._tell(_END_OF_BODY)
            elif event is h11.PAUSED and self._h11.trailing_data[0].lstrip(_EMPTY_LINES):
                await self._next.park()
            else:
                return

    async def _begin(self, request: h11.Request) -> None:
        await self._send(Updated(idle=False))
        path, _, query = request.target.partition(b"?")
        method = request.method.decode("ascii").upper()
        scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"spec_version": "2.1", "version": "3.0"},
            "http_version": request.http_version.decode("ascii"),
            "method": method,
            "scheme": "http",
            "path": unquote(path.decode("ascii")),
            "raw_path": path,
            "query_string": query,
            "root_path": self._config.root_path,
            "headers": list(request.headers),
            "client": self._client,
            "server": self._server,
            "state": {},
            "extensions": {},
        }
        self._turn = turn = object()

        async def send(message: Message | None) -> None:
            # A handler may end when the request after its own has begun already.
            if self._turn is turn:
                await self._on_message(message)

        async def want() -> None:
            if self._turn is turn and self._h11.they_are_waiting_for_100_continue:
                await self._write(h11.InformationalResponse(status_code=100, headers=self._config.response_headers("h11")))

        self._put = await self._answer(scope, send, want)

    async def _on_message(self, message: Message | None) -> None:
        """What the handler sends; nothing of it is for a client that has gone."""
        if self._put is None:
            return
        if message is None:  # before it was complete
            ending = self._context.terminated.is_set() and trio.current_effective_deadline() == -math.inf
            await self._refuse(ShuttingDown() if ending else CallError(500, "the request failed within headrace, which has logged why"))
        elif message["type"] == "http.response.start" and not self._head:
            self._head = message
        elif message["type"] == "http.response.body" and self._head:
            await self._respond(message)
        else:
            raise RuntimeError(f"the handler sends {message['type']} out of turn")

    async def _respond(self, message: Message) -> None:
        """Send a part of the body; the head goes with the first one."""
        events: list[_Sent] = []
        if self._h11.our_state is h11.SEND_RESPONSE:
            status = int(self._head["status"])
            self._bodiless = self._bodiless or status in _BODILESS
            headers = [*self._head.get("headers", ()), *self._config.response_headers("h11")]
            if self.unread:
                headers.append((b"connection", b"close"))
            events.append(h11.Response(status_code=status, headers=headers))
        if (body := message.get("body", b"")) and not self._bodiless:
            events.append(h11.Data(data=bytes(body)))
        complete = not message.get("more_body", False)
        if complete:
            events.append(h11.EndOfMessage())
        await self._write(*events)
        if complete:
            await self._complete()

    async def _complete(self) -> None:
        await self._disconnect()
        self._head = {}
        self._bodiless = False
        if self._h11.our_state is h11.DONE and self._h11.their_state is h11.DONE and not self._context.terminated.is_set():
            self._start_next_cycle()
            self._next.unpark()
            await self._send(Updated(idle=True))
        else:
            await self._close()

    def _fresh(self) -> h11.Connection:
        return h11.Connection(h11.SERVER, max_incomplete_event_size=self._config.h11_max_incomplete_size)

    def _start_next_cycle(self) -> None:
        ahead, _ = self._h11.trailing_data
        if ahead[:1] in (b"\r", b"\n"):
            self._h11 = self._fresh()
            if ahead := ahead.lstrip(_EMPTY_LINES):
                self._h11.receive_data(ahead)
        else:
            self._h11.start_next_cycle()

    async def _refuse(self, error: CallError) -> None:
        """Answer in the handler's place, unless an answer has begun, and close."""
        if self._h11.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = msgspec.json.encode(error.body)
            headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), (b"connection", b"close")]
            response = h11.Response(status_code=error.status, headers=[*headers, *self._config.response_headers("h11")])
            content = [] if self._bodiless else [h11.Data(data=body)]
            await self._write(response, *content, h11.EndOfMessage())
        await self._close()

    async def _close(self) -> None:
        await self._disconnect()
        self._next.unpark()
        await self._send(Closed())

    async def _tell(self, message: Message) -> None:
        if self._put is not None:
            await self._put(message)

    async def _disconnect(self) -> None:
        put, self._put = self._put, None
        if put is not None:
            await put(_DISCONNECT)

    async def _write(self, *events: _Sent) -> None:
        try:
            data = b"".join([self._h11.send(event) for event in events])
        except h11.LocalProtocolError:
            if self._h11.their_state is not h11.ERROR:
                raise
            return
        await self._send(RawData(data))


def _refusal(status: int, config: Config) -> CallError:
    """What h11 can't read, without the client's bytes: a key may be among them."""
    if status == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE:
        return CallError(status, f"the head of the request is larger than {config.h11_max_incomplete_size} bytes")
    if status == HTTPStatus.NOT_IMPLEMENTED:
        return CallError(status, "transfer-encoding: only chunked is served")
    return CallError(status, "the request is not HTTP/1.1")


def _unserved(request: h11.Request) -> CallError | None:
    """Why a request isn't served that h11 reads."""
    if not request.http_version.startswith(b"1."):
        return CallError(505, f"HTTP/{request.http_version.decode('ascii')} is not served, but HTTP/1.1 and HTTP/2 are")
    framing = {name for name, _ in request.headers if name in (b"content-length", b"transfer-encoding")}
    if len(framing) > 1:
        # RFC 9112, 6.1: whoever passed it on may have read another end of the body, and so another next request.
        return CallError(400, "content-length and transfer-encoding: a request has one of them, not both")
    return None
