"""A worker's gRPC, spoken through headrace's own channel and stubs."""

from collections.abc import AsyncGenerator, Awaitable, Iterable
from contextlib import asynccontextmanager
from typing import Any

from google.protobuf import text_format

from core.wire import Cardinality, Channel, GRPCError, Status, open_channel
from core.wire.generated import inference_pb2 as pb
from core.wire.generated.grpc.health.v1 import HealthCheckRequest, HealthCheckResponse, HealthStub
from core.wire.generated.vllm import ControlStub
from tests.conformance.over_grpc.coverage import Seen
from tests.workers import RunningWorker

PROMPT = tuple(b"Hello, w!")

GENERATE = "/vllm.Inference/Generate"
GENERATE_STREAM = "/vllm.Inference/GenerateStream"


def request(text: str = "", *, prompt: Iterable[int] = PROMPT, tokens: int = 4) -> pb.GenerateRequest:
    """A request for exactly `tokens` greedy tokens, changed by what `text` says in protobuf's text format."""
    message = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=prompt),
        stopping=pb.StoppingCriteria(max_new_tokens=tokens, ignore_eos=True),
        response=pb.ResponseOptions(output_token_ids=True),
    )
    return text_format.Merge(text, message)


class Client:
    """Calls to one worker; what goes over the wire is noted in `seen`."""

    def __init__(self, worker: RunningWorker, channel: Channel, seen: Seen) -> None:
        seen.kinds.add(worker.kind)
        self.worker = worker
        self.channel = channel
        noting: Any = _Noting(channel, seen)
        self._noting = noting
        self.control = ControlStub(noting)
        self.health = HealthStub(noting)

    async def generate(self, message: pb.GenerateRequest, **metadata: str) -> pb.GenerateResponse:
        """The reply to `Generate`; metadata with `_` for `-`."""
        async with self._call(GENERATE, metadata) as stream:
            await stream.send_message(message, end=True)
            return await stream.recv_message()

    @asynccontextmanager
    async def opened(self, message: pb.GenerateRequest, **metadata: str) -> AsyncGenerator[Any, None]:
        """A `GenerateStream` call; iterating over it gives its messages. Cancelled when it is left before its end."""
        async with self._call(GENERATE_STREAM, metadata) as stream:
            await stream.send_message(message, end=True)
            yield stream

    @asynccontextmanager
    async def watching(self, service: str = "") -> AsyncGenerator[Any, None]:
        """A `Watch` call; iterating over it gives its messages. The stub's own generator can't be left before its end."""
        path = "/grpc.health.v1.Health/Watch"
        async with self._noting.request(path, Cardinality.UNARY_STREAM, HealthCheckRequest, HealthCheckResponse) as stream:
            await stream.send_message(HealthCheckRequest(service=service), end=True)
            yield stream

    async def stream(self, message: pb.GenerateRequest, **metadata: str) -> list[pb.GenerateResponse]:
        """All messages of `GenerateStream`."""
        async with self.opened(message, **metadata) as stream:
            return [reply async for reply in stream]

    async def tokens(self, message: pb.GenerateRequest) -> list[int]:
        """The output of `Generate`."""
        return list((await self.generate(message)).outputs.token_ids)

    def _call(self, path: str, metadata: dict[str, str]) -> Any:
        cardinality = Cardinality.UNARY_UNARY if path == GENERATE else Cardinality.UNARY_STREAM
        named = {key.replace("_", "-"): value for key, value in metadata.items()}
        return self._noting.request(path, cardinality, pb.GenerateRequest, pb.GenerateResponse, metadata=named)


@asynccontextmanager
async def client_of(worker: RunningWorker, seen: Seen) -> AsyncGenerator[Client, None]:
    """A client of a worker, for as long as the block lasts."""
    host, port = worker.grpc.split(":")
    async with open_channel(host, int(port)) as channel:
        yield Client(worker, channel, seen)


async def refusal(call: Awaitable[Any]) -> tuple[Status, str]:
    """The status and the message with which a call ends; it must not end well."""
    try:
        reply = await call
    except GRPCError as error:
        return error.status, error.message or ""
    raise AssertionError(f"answered with {reply}")


class _Noting:
    """A channel that notes what its calls send and receive."""

    def __init__(self, channel: Channel, seen: Seen) -> None:
        self._channel = channel
        self._seen = seen

    def request(self, path: str, *arguments: Any, **options: Any) -> "_NotingStream":
        self._seen.call(path)
        return _NotingStream(self._channel.request(path, *arguments, **options), self._seen)


class _NotingStream:
    def __init__(self, stream: Any, seen: Seen) -> None:
        self._stream = stream
        self._seen = seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def __aenter__(self) -> "_NotingStream":
        await self._stream.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._stream.__aexit__(*error)

    async def send_message(self, message: Any, *, end: bool = False) -> None:
        self._seen.message(message)
        await self._stream.send_message(message, end=end)

    async def recv_message(self) -> Any:
        message = await self._stream.recv_message()
        self._seen.message(message)
        return message

    def __aiter__(self) -> "_NotingStream":
        return self

    async def __anext__(self) -> Any:
        message = await self.recv_message()
        if message is None:
            raise StopAsyncIteration
        return message
