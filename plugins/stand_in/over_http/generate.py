"""`POST /inference/v1/generate`: whole, or as server-sent events."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import msgspec
from quart import Blueprint, Response, request

from plugins.stand_in.engine.call import Event, PromptRead
from plugins.stand_in.engine.engine import Engine
from plugins.stand_in.engine.rank import parse_rank
from plugins.stand_in.engine.refusal import Refused
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
        rank = parse_rank(request.headers.get("x-data-parallel-rank", ""))  # one that is no number is ignored, as in vllm-rs 0.33.0
        call = to_call(body, request.headers.get("x-request-id"), engine.options, engine.adapters, rank)
        plan = engine.admit(call)
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
