"""Calls over vLLM's native gRPC: unary calls by `Generate`, streams by `GenerateStream`."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from grpclib.const import Cardinality
from grpclib.exceptions import GRPCError

from core.call import Call
from core.errors import CallError, from_grpc
from core.reply import Output
from core.wire import Channel, Stream
from core.wire.generated.inference_pb2 import GenerateRequest, GenerateResponse, PromptInfo
from core.wire.grpc_lifting import Reply, lift_from_grpc
from core.wire.grpc_lowering import lower_to_grpc
from core.wire.needs import GRPC_CAN, Wire

_GENERATE = "/vllm.Inference/Generate"
_GENERATE_STREAM = "/vllm.Inference/GenerateStream"


class GrpcLane:
    """`core.wire.lane.Lane` over a channel. `max_model_len` is the worker's, in tokens."""

    wire: Wire = "grpc"
    can = GRPC_CAN

    def __init__(self, channel: Channel, *, max_model_len: int, rank: int | None = None) -> None:
        self._channel = channel
        self._max_model_len = max_model_len
        self._metadata = None if rank is None else {"x-data-parallel-rank": str(rank)}

    def at_rank(self, rank: int) -> "GrpcLane":
        """See `Lane`."""
        return GrpcLane(self._channel, max_model_len=self._max_model_len, rank=rank)

    def lower(self, call: Call, index: int) -> GenerateRequest:
        """See `Lane`."""
        return lower_to_grpc(call, index=index, max_model_len=self._max_model_len)

    async def generate(self, call: Call, request: GenerateRequest, index: int) -> Output:
        """See `Lane`."""
        try:
            reply = await self._channel.unary(_GENERATE, Reply, request, metadata=self._metadata)
        except GRPCError as error:
            raise from_grpc(error) from error
        return lift_from_grpc(call, reply.message, index, data=reply.data)

    @asynccontextmanager
    async def stream(self, call: Call, request: GenerateRequest, index: int) -> AsyncGenerator["GrpcOutputStream", None]:
        """See `Lane`."""
        opened = self._channel.request(
            _GENERATE_STREAM, Cardinality.UNARY_STREAM, GenerateRequest, GenerateResponse, metadata=self._metadata
        )
        try:
            async with opened as stream:
                await stream.send_message(request, end=True)
                yield GrpcOutputStream(stream, call, index)
        except GRPCError as error:
            raise from_grpc(error) from error


class GrpcOutputStream:
    """`core.wire.lane.OutputStream` over a gRPC stream."""

    def __init__(self, stream: Stream[GenerateRequest, GenerateResponse], call: Call, index: int) -> None:
        self._stream = stream
        self._call = call
        self._index = index
        self._prompt: PromptInfo | None = None
        self._finished = False

    async def receive(self) -> list[Output]:
        """See `OutputStream`."""
        outputs: list[Output] = []
        while not outputs and not self._finished:
            for message in await self._messages():
                if message.HasField("outputs"):
                    outputs.append(lift_from_grpc(self._call, message, self._index, prompt=self._prompt))
                    self._prompt = None
                    self._finished = outputs[-1].choice.finish_reason is not None
                else:
                    self._prompt = message.prompt_info
        return outputs

    async def _messages(self) -> list[GenerateResponse]:
        try:
            messages = await self._stream.recv_messages()
        except GRPCError as error:
            raise from_grpc(error) from error
        if not messages:
            raise CallError(500, "the worker ended the stream without a finish reason")
        return messages

    def release(self) -> None:
        """See `OutputStream`."""
        self._stream.cancel()
