"""How the gRPC server treats bytes: limits, compression, garbage, many streams."""

import asyncio
from typing import Any, cast

import grpc
import pytest
from grpclib.const import Cardinality, Status

from core.wire.generated import inference_pb2 as pb
from tests.unit.stand_in.serving import Worker, over_asyncio, refusal, request, worker

GENERATE = "/vllm.Inference/Generate"


class Raw:
    """A message that is the bytes that it was made of."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def SerializeToString(self) -> bytes:  # noqa: N802 (protobuf's name)
        return self.data

    @classmethod
    def FromString(cls, data: bytes) -> "Raw":  # noqa: N802
        return cls(data)


async def send(stand_in: Worker, path: str, data: bytes) -> Raw | None:
    async with stand_in.channel.request(path, Cardinality.UNARY_UNARY, cast("Any", Raw), cast("Any", Raw)) as stream:
        await stream.send_message(cast("Any", Raw(data)), end=True)
        return cast("Raw | None", await stream.recv_message())


@over_asyncio
async def test_a_message_over_32_mib_is_out_of_range_and_one_of_five_is_fine():
    async with worker() as stand_in:
        status, _ = await refusal(send(stand_in, GENERATE, bytes(32 * 1024 * 1024 + 1)))
        assert status is Status.OUT_OF_RANGE
        large = request(prompt=[1], tokens=1)
        large.response.ClearField("output_token_ids")
        large.kv.kv_transfer_params.update({"filler": "x" * 5 * 1024 * 1024})
        assert (await stand_in.generate(large)).outputs.num_tokens == 1


@pytest.mark.parametrize("path", [GENERATE, "/vllm.Control/Abort", "/grpc.health.v1.Health/Check"])
@pytest.mark.parametrize("data", [b"\xff", b"\x0a\x05a", b"\x0a\x01\xff"], ids=["cut off", "too short", "no text"])
@over_asyncio
async def test_bytes_that_are_no_message_are_an_internal_error(path, data):
    async with worker() as stand_in:
        status, message = await refusal(send(stand_in, path, data))
        assert status is Status.INTERNAL
        assert message.startswith("failed to decode Protobuf message")


@pytest.mark.parametrize("path", ["/vllm.Control/Nothing", "/vllm.Nothing/Generate", "/grpc.health.v1.Health/List"])
@over_asyncio
async def test_an_unknown_rpc_is_unimplemented(path):
    async with worker() as stand_in:
        assert (await refusal(send(stand_in, path, b"")))[0] is Status.UNIMPLEMENTED


@over_asyncio
async def test_a_compressed_message_is_unimplemented():
    async with worker() as stand_in:
        async with grpc.aio.insecure_channel(f"{stand_in.ready.host}:{stand_in.ready.grpc_port}") as channel:
            generate = channel.unary_unary(GENERATE, pb.GenerateRequest.SerializeToString, pb.GenerateResponse.FromString)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await generate(request(prompt=[1] * 1000), compression=grpc.Compression.Gzip)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


@over_asyncio
async def test_a_connection_carries_more_than_a_hundred_calls_at_once():
    async with worker() as stand_in:
        await stand_in.post("/pause", mode="keep")
        calls = [asyncio.create_task(stand_in.tokens(request(tokens=1))) for _ in range(250)]
        while (await stand_in.http.get("/load")).json()["server_load"] < 250:
            pass
        await stand_in.post("/resume")
        assert len({tuple(tokens) for tokens in await asyncio.gather(*calls)}) == 1


@over_asyncio
async def test_a_stock_grpc_client_is_served():
    async with worker() as stand_in:
        async with grpc.aio.insecure_channel(f"{stand_in.ready.host}:{stand_in.ready.grpc_port}") as channel:
            stream = channel.unary_stream(
                "/vllm.Inference/GenerateStream", pb.GenerateRequest.SerializeToString, pb.GenerateResponse.FromString
            )
            messages = [message async for message in stream(request())]
        assert len(messages) == 5
