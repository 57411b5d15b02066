"""Requests that go to a worker's HTTP server as they are, and whose answers come back byte for byte.

They are placed, counted, settled and cancelled like any call; only lowering and lifting are nearly nothing.
"""

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, suppress
from http import HTTPStatus
from typing import Final, Literal, Protocol

import msgspec
import trio
from msgspec import Raw

from core.call import Call, Outcome, SamplingParams
from core.errors import CallError, WorkerLost
from core.hookspecs import Choice
from core.northbound.answering import answering, reply_headers, send_error
from core.northbound.body import RANK_HEADER, call_id, rank_of
from core.northbound.headers import encode_headers
from core.path import Path
from core.refusals import refusing
from core.relayed import RelayedBody
from core.routes import Exchange
from core.serving.client import Client, Clients
from core.wire.http_relay import Answer, RelayedRequest, ask

#: Members that the core reads; the others are the call's `unclaimed`.
_READ: Final = frozenset({"model", "stream", "cache_salt", "request_id"})
_TRUE: Final = Raw(b"true")
#: Empty lines at the end of an event.
_EVENT_ENDS: Final = (b"\n\n", b"\r\n\r\n", b"\r\r")
#: The last event of a stream, and the seconds within which the worker ends its answer behind it.
_DONE: Final = b"data: [DONE]\n\n"
_END: Final = 1.0

_members = msgspec.json.Decoder(dict[str, Raw])
_text = msgspec.json.Decoder(str | None)
_encoder = msgspec.json.Encoder()


class Reader(Protocol):
    """Reads along while an answer passes, for `call_settled`."""

    def see(self, data: bytes) -> None:
        """The next bytes of an answer with a status below 400; must cost next to nothing."""
        ...

    def settle(self, call: Call, outcome: Outcome) -> None:
        """The answer is complete: note in `outcome` what was learned."""
        ...


class Relay:
    """Relays requests whose body is a JSON object. The worker's own `Authorization` goes with them, never the client's."""

    def __init__(self, path: Path, clients: Clients) -> None:
        self._path = path
        self._clients = clients

    async def __call__(self, exchange: Exchange, reader: Reader | None = None, *, touches_kv: bool = True) -> None:
        """Relay one request to the same path of a worker, and write its answer.

        A worker that is lost before its first byte is replaced by another one. One that is lost later can't be: events then end with one
        that has the error in vLLM's form, and every answer ends without its end, so that its client knows.

        `touches_kv`: see `Call`.

        Cancellation: the worker's connection is closed at once.
        Raises: `BadRequest` for a body that is no JSON object; nothing once the call has begun.
        """
        call, body = parse_relayed(exchange.request.body, exchange.request.headers, touches_kv=touches_kv)
        request = _request(exchange, call)

        def ask_worker(choice: Choice, data: bytes) -> AbstractAsyncContextManager[Answer]:
            assert choice.worker.http is not None  # it wouldn't be eligible
            return ask(choice.worker.http, request if choice.rank is None else _at_rank(request, choice.rank), data)

        async with answering(self._path, self._clients, call, exchange.receive, exchange.send) as (outcome, client):
            reply: _Reply | None = None
            try:
                async with self._path.relayed(call, outcome, body, ask_worker) as answer:
                    client.release = answer.release
                    reply = _Reply(client, answer, reply_headers(call, outcome), exchange.http_version)
                    client.break_off = reply.break_off
                    await reply.write_all(reader if answer.status < HTTPStatus.BAD_REQUEST else None)
                outcome.kind, outcome.status = _kind(answer.status), answer.status
                if reader and outcome.kind == "ok":
                    reader.settle(call, outcome)
            except CallError as error:
                self._path.fail(call, outcome, error)
                if reply is None:
                    await send_error(client.send, error, reply_headers(call, outcome))
                else:
                    await reply.break_off(error)


def parse_relayed(data: bytes, headers: Mapping[str, str], *, touches_kv: bool = True) -> tuple[Call, RelayedBody]:
    """The call that a body asks for, of which only the top level is read, and the body to send on.

    `x-request-id` wins over the body's `request_id`.

    Raises: `BadRequest`.
    """
    with refusing(""):
        members = _members.decode(data)
    model, cache_salt = _string(members, "model"), _string(members, "cache_salt")
    call = Call(
        id=call_id(headers, _string(members, "request_id")),
        token_ids=[],
        sampling=SamplingParams(),
        model=model,
        stream=members.get("stream") == _TRUE,
        cache_salt=cache_salt,
        session_id=headers.get("x-session-id", ""),
        data_parallel_rank=rank_of(headers),
        relayed=True,
        touches_kv=touches_kv,
        headers=headers,
        unclaimed={key: raw for key, raw in members.items() if key not in _READ},
    )
    return call, RelayedBody(data, members, model, cache_salt)


def _string(members: Mapping[str, Raw], key: str) -> str:
    if (raw := members.get(key)) is None:
        return ""
    with refusing(key):
        return _text.decode(raw) or ""


def _request(exchange: Exchange, call: Call) -> RelayedRequest:
    request = exchange.request
    # The worker gets the call's id whoever gave it, so that its log and its reply have the same.
    headers = {**request.headers, "x-request-id": call.id}
    return RelayedRequest(
        request.method,
        request.path.encode() + (b"?" + exchange.query_string if exchange.query_string else b""),
        [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()],
    )


def _at_rank(request: RelayedRequest, rank: int) -> RelayedRequest:
    name = RANK_HEADER.encode()
    headers = [header for header in request.headers if header[0] != name]
    return msgspec.structs.replace(request, headers=[*headers, (name, b"%d" % rank)])


def _kind(status: int) -> Literal["ok", "refused", "failed"]:
    if status < HTTPStatus.BAD_REQUEST:
        return "ok"
    return "refused" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "failed"


class _Reply:
    """A worker's answer on its way to the client, with headers of ours in the place of the worker's."""

    def __init__(self, client: Client, answer: Answer, headers: Mapping[str, str], http_version: str) -> None:
        self._client = client
        self._answer = answer
        self._headers = headers
        self._http_version = http_version
        self._end = b""

    async def write_all(self, reader: Reader | None) -> None:
        """Write the answer as it comes. Raises: `WorkerLost`."""
        ours = encode_headers(self._headers)
        names = {name for name, _ in ours}
        head = [header for header in self._answer.headers if header[0] not in names] + ours
        await self._client.send({"type": "http.response.start", "status": self._answer.status, "headers": head})
        while data := await self._answer.receive():
            if reader:
                reader.see(data)
            self._end = (self._end + data)[-len(_DONE) :]
            done = self._answer.is_events and self._end == _DONE
            await self._client.send({"type": "http.response.body", "body": data, "more_body": not done})
            if done:  # openai's clients leave here, and have got all of it; a connection that was read to its end is used again
                with trio.move_on_after(_END), suppress(WorkerLost):
                    await self._answer.receive()
                return
        await self._client.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def break_off(self, error: CallError) -> None:
        """End what can't be ended well. The last event is not added to half of another one."""
        if self._answer.is_events and (not self._end or self._end.endswith(_EVENT_ENDS)):
            event = b"data: " + _encoder.encode(error.body) + b"\n\n"
            await self._client.send({"type": "http.response.body", "body": event, "more_body": True})
        # A handler that returns before the end of its response is how an ASGI server learns that there is none: it closes the connection.
        # Of HTTP/2 streams hypercorn 0.18 would let the client wait for ever.
        if self._http_version == "2":
            await self._client.send({"type": "http.response.body", "body": b"", "more_body": False})
