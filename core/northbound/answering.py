"""What every answer to a call has in common: the scope in which it settles, and the responses that are written whole."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from uuid import uuid4

import msgspec

from core.call import Call, Outcome
from core.errors import CallError, ClientGone, ShuttingDown
from core.northbound.headers import encode_headers
from core.path import Path
from core.serving.asgi import Receive, Send
from core.serving.client import Client, Clients

_encoder = msgspec.json.Encoder()


@asynccontextmanager
async def answering(path: Path, clients: Clients, call: Call, receive: Receive, send: Send) -> AsyncGenerator[tuple[Outcome, Client], None]:
    """The scope of a call and of its client: the call settles when both are done, and is cancelled when its client is lost.

    For after the body was read: nobody else may await `receive`.
    """
    with path.settling(call) as outcome:
        async with clients.connected(receive, send) as client:
            client.farewell = partial(_say_farewell, client, call, outcome)
            yield outcome, client
        if client.lost:
            outcome.kind, outcome.status, outcome.error = "client-gone", ClientGone().status, "stalled" if client.stalled else ""


async def _say_farewell(client: Client, call: Call, outcome: Outcome) -> None:
    """Headrace ends: answer the call with that, or end with it what has begun, if that can be."""
    error = ShuttingDown()
    outcome.error = error.message
    if not client.started:
        await send_error(client.send, error, reply_headers(call, outcome))
    elif client.break_off:
        await client.break_off(error)


def refused_id(headers: Mapping[str, str]) -> dict[str, str]:
    """The header for an answer to what did not become a call: the id with which the client will look for it, or one of ours."""
    return {"x-request-id": headers.get("x-request-id") or uuid4().hex}


def reply_headers(call: Call, outcome: Outcome) -> dict[str, str]:
    """The headers that say where a reply came from."""
    headers = {"x-request-id": call.id, **call.reply_headers}
    if outcome.worker:
        headers |= {"x-headrace-worker": outcome.worker, "x-headrace-route": outcome.route}
    return headers


async def send_json(send: Send, status: int, body: bytes, headers: Mapping[str, str]) -> None:
    """A whole response. Raises what `send` raises."""
    raw = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    raw += encode_headers(headers)
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def send_error(send: Send, error: CallError, headers: Mapping[str, str]) -> None:
    """vLLM's error body."""
    retry = {} if error.retry_after is None else {"retry-after": str(error.retry_after)}
    await send_json(send, error.status, _encoder.encode(error.body), {**headers, **retry})
