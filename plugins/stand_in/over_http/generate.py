"""`POST /inference/v1/generate`: whole, or as server-sent events."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import msgspec
from quart import Blueprint, Request, Response, request

from plugins.stand_in.engine.call import Event, PromptRead
from plugins.stand_in.engine.engine import Engine
from plugins.stand_in.engine.refusal import Refused, invalid
from plugins.stand_in.over_http.body import Body
from plugins.stand_in.over_http.errors import json_response, read_json, refused_body
from plugins.stand_in.over_http.reply import Reply
from plugins.stand_in.over_http.request import to_call

_DONE = b"data: [DONE]\n\n"


def routes(engine: Engine) -> Blueprint:
    """The generate route. A client that goes away cancels the handler, and that takes the call out of the engine."""
    blueprint = Blueprint("generate", __name__)

    @blueprint.post("/inference/v1/generate")
    async def generate() -> Response:
        body = await read_json(request, Body)
        call = to_call(body, request.headers.get("x-request-id"), engine.options, engine.adapters)
        plan = engine.admit(call)
        _check_rank(request)
        events = engine.run(plan)
        reply = Reply(body, call.request_id)
        if body.stream:
            response = Response(_stream(events, reply), content_type="text/event-stream")
            response.timeout = None
            return response
        async with aclosing(events):
            async for event in events:
                reply.add(event)
        return json_response(reply.whole())

    return blueprint


async def _stream(events: AsyncGenerator[Event, None], reply: Reply) -> AsyncIterator[bytes]:
    try:
        async with aclosing(events):
            async for event in events:
                reply.add(event)
                if not isinstance(event, PromptRead):
                    yield _event(reply.chunk(event))
        if closing := reply.closing():
            yield _event(closing)
    except Refused as refused:
        # The status has gone out already: vLLM says it in the stream.
        yield _event(refused_body(refused)[0])
    yield _DONE


def _event(value: Any) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _check_rank(current: Request) -> None:
    """vllm-rs 0.33.0 ignores a rank that is no number, and checks it only when it submits the call."""
    rank = current.headers.get("x-data-parallel-rank", "").strip()
    if rank.isdigit() and int(rank) != 0:
        raise invalid(f"data parallel rank {rank} is not connected; connected ranks: [0]")
