"""A stand-in in this process's event loop, and clients for both its wires.

The stand-in runs on asyncio, so its tests do: `over_asyncio` makes a plain test of a coroutine.
"""

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from google.protobuf import text_format
from grpclib.client import Channel, Stream
from grpclib.const import Cardinality, Status
from grpclib.exceptions import GRPCError

from core.wire.generated import inference_pb2 as pb
from core.wire.generated import vllm
from core.wire.generated.grpc.health.v1 import HealthStub
from plugins.stand_in.options import Options
from plugins.stand_in.server import Ready, serve

#: Seconds that a test may take before it counts as hung.
PATIENCE = 20.0


#: More tokens than any test waits for.
ENDLESS = "stopping { ignore_eos: true max_new_tokens: 30000 }"


def over_asyncio(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test coroutine under asyncio."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(PATIENCE):
                await test(*args, **kwargs)

        asyncio.run(bounded())

    return run


def request(text: str = "", *, prompt: Iterable[int] = (1, 2, 3), tokens: int = 4) -> pb.GenerateRequest:
    """A request for `tokens` greedy tokens, changed by what `text` says in protobuf's text format."""
    message = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt))
    message.stopping.max_new_tokens = tokens
    message.response.output_token_ids = True
    return text_format.Merge(text, message)


def body(prompt: Iterable[int] = (1, 2, 3), *, sampling: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """A generate body for four greedy tokens, with what is given on top."""
    return {"token_ids": list(prompt), "sampling_params": {"max_tokens": 4, "temperature": 0, **(sampling or {})}, **fields}


@dataclass
class Worker:
    """A running stand-in and the clients that speak to it."""

    ready: Ready
    ending: asyncio.Event
    channel: Channel
    http: httpx.AsyncClient
    control: vllm.ControlStub = field(init=False)
    health: HealthStub = field(init=False)

    def __post_init__(self) -> None:
        self.control = vllm.ControlStub(self.channel)
        self.health = HealthStub(self.channel)

    async def generate(self, message: pb.GenerateRequest, *, timeout: float | None = None, **metadata: str) -> pb.GenerateResponse:
        async with self._call("Generate", Cardinality.UNARY_UNARY, metadata, timeout) as stream:
            await stream.send_message(message, end=True)
            response = await stream.recv_message()
        assert response is not None
        return response

    async def stream(self, message: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
        async with self._call("GenerateStream", Cardinality.UNARY_STREAM, {}, None) as stream:
            await stream.send_message(message, end=True)
            async for response in stream:
                yield response

    async def messages(self, message: pb.GenerateRequest) -> list[pb.GenerateResponse]:
        return [response async for response in self.stream(message)]

    async def tokens(self, message: pb.GenerateRequest) -> list[int]:
        return list((await self.generate(message)).outputs.token_ids)

    async def post(self, path: str, json: Any = None, **parameters: Any) -> httpx.Response:
        return await self.http.post(path, **({} if json is None else {"json": json}), params=parameters)

    async def generate_http(self, json: dict[str, Any]) -> dict[str, Any]:
        response = await self.post("/inference/v1/generate", json)
        assert response.status_code == 200, response.text
        return response.json()

    def _call(
        self, rpc: str, cardinality: Cardinality, metadata: dict[str, str], timeout: float | None
    ) -> Stream[pb.GenerateRequest, pb.GenerateResponse]:
        named = {key.replace("_", "-"): value for key, value in metadata.items()}
        path = f"/vllm.Inference/{rpc}"
        return self.channel.request(path, cardinality, pb.GenerateRequest, pb.GenerateResponse, metadata=named, timeout=timeout)


@asynccontextmanager
async def worker(**options: Any) -> AsyncIterator[Worker]:
    """A stand-in with these options, for as long as the block lasts."""
    ending = asyncio.Event()
    ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
    server = asyncio.create_task(serve(Options(**options), ending, ready.set_result))
    try:
        await asyncio.wait({server, ready}, return_when=asyncio.FIRST_COMPLETED)
        address = await ready if ready.done() else await server
        assert address is not None
        channel = Channel(address.host, address.grpc_port)
        try:
            async with httpx.AsyncClient(base_url=f"http://{address.host}:{address.http_port}", timeout=PATIENCE) as http:
                yield Worker(address, ending, channel, http)
        finally:
            channel.close()
    finally:
        ending.set()
        await server


async def refusal(call: Awaitable[Any]) -> tuple[Status, str]:
    """The status and the message with which a call is refused; it must be."""
    try:
        answer = await call
    except GRPCError as error:
        return error.status, error.message or ""
    raise AssertionError(f"not refused, but answered: {answer}")


async def begin(stand_in: Worker, text: str = ENDLESS) -> "tuple[asyncio.Task[list[pb.GenerateResponse]], asyncio.Event]":
    """Start a stream; returns once its first token is here, with an event that is set at each later message."""
    first, later = asyncio.Event(), asyncio.Event()

    async def read() -> list[pb.GenerateResponse]:
        messages: list[pb.GenerateResponse] = []
        async for message in stand_in.stream(request(text)):
            messages.append(message)
            if first.is_set():
                later.set()
            elif message.outputs.num_tokens:
                first.set()
        return messages

    task = asyncio.create_task(read())
    await first.wait()
    return task, later
