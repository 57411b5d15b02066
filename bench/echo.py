"""What the yardstick of a streamed token runs: an ASGI application with no worker, which makes its events up.

On hypercorn's trio worker it does what any Python proxy must do at the least: it writes the same events as headrace, as often, to as many
clients. How many microseconds that takes depends on the machine; how many times as many headrace takes depends much less on it.
"""

from math import floor
from typing import Final

import msgspec
import trio

from bench.cases import PACE_SECONDS
from core.serving.asgi import Receive, Scope, Send
from core.serving.client import read_body

_EVENT: Final = b'data: {"request_id":"00112233445566778899aabbccddeeff","choices":[{"index":0,"token_ids":[100]}]}\n\n'
_HEAD: Final = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]


class _Sampling(msgspec.Struct):
    max_tokens: int


class _Request(msgspec.Struct):
    sampling_params: _Sampling


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer every POST as a stream of `max_tokens` tokens, and everything else with nothing."""
    if scope["type"] == "lifespan":
        for phase in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{phase}.complete"})
        return
    body = await read_body(receive)
    await send({"type": "http.response.start", "status": 200, "headers": _HEAD})
    if scope["method"] == "POST":
        for _ in range(msgspec.json.decode(body, type=_Request).sampling_params.max_tokens):
            await trio.sleep_until(_next_step())
            await send({"type": "http.response.body", "body": _EVENT, "more_body": True})
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


def _next_step() -> float:
    """The paced engine's steps are those of all its requests, so that their tokens come at the same time."""
    return (floor(trio.current_time() / PACE_SECONDS) + 1) * PACE_SECONDS
