"""`vllm.Inference`: its two rpcs over protobuf's own messages."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from grpclib.const import Cardinality, Handler
from grpclib.server import Stream

from core.wire.generated import inference_pb2 as pb
from plugins.stand_in.engine.call import Event, PromptRead
from plugins.stand_in.engine.engine import Engine
from plugins.stand_in.engine.rank import parse_rank
from plugins.stand_in.engine.refusal import invalid
from plugins.stand_in.over_grpc.reply import add_prompt, add_step
from plugins.stand_in.over_grpc.request import to_call

RANK = "x-data-parallel-rank"

_Stream = Stream[pb.GenerateRequest, pb.GenerateResponse]


class Inference:
    """The service, in the form that grpclib serves.

    A client that goes away, or a deadline, cancels the handler, and that takes the call out of the engine.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __mapping__(self) -> dict[str, Handler]:
        """The rpcs by path."""
        return {
            "/vllm.Inference/Generate": Handler(self.generate, Cardinality.UNARY_UNARY, pb.GenerateRequest, pb.GenerateResponse),
            "/vllm.Inference/GenerateStream": Handler(
                self.generate_stream, Cardinality.UNARY_STREAM, pb.GenerateRequest, pb.GenerateResponse
            ),
        }

    async def generate(self, stream: _Stream) -> None:
        """Answer with one message."""
        request, events = await self._begin(stream)
        response = pb.GenerateResponse()
        async with aclosing(events):
            async for event in events:
                _add(response, event, request.response)
        await stream.send_message(response)

    async def generate_stream(self, stream: _Stream) -> None:
        """Answer with `prompt_info`, then with each step."""
        request, events = await self._begin(stream)
        async with aclosing(events):
            async for event in events:
                response = pb.GenerateResponse()
                _add(response, event, request.response)
                await stream.send_message(response)

    async def _begin(self, stream: _Stream) -> tuple[pb.GenerateRequest, AsyncGenerator[Event, None]]:
        request = await stream.recv_message()
        assert request is not None
        # A rank that is none is refused before everything else, one that isn't there only by who would hand the call to it.
        rank = _rank(stream)
        plan = self._engine.admit(to_call(request, self._engine.options, self._engine.adapters, rank))
        return request, self._engine.run(plan)


def _add(response: pb.GenerateResponse, event: Event, options: pb.ResponseOptions) -> None:
    if isinstance(event, PromptRead):
        add_prompt(response, event, options)
    else:
        add_step(response, event, options, text=options.output_text if options.HasField("output_text") else True)


def _rank(stream: _Stream) -> int | None:
    value = (stream.metadata or {}).get(RANK)
    if value is None:
        return None
    if not isinstance(value, str) or (rank := parse_rank(value)) is None:
        raise invalid(f"{RANK} must be an unsigned 32-bit integer")
    return rank
