"""What holds for every message: sizes, compression, bytes that are no message, methods that don't exist."""

import grpc
import pytest

from core.wire import Status
from core.wire.generated import inference_pb2 as pb
from tests.conformance.over_grpc.client import GENERATE, refusal, request

LIMIT = 32 * 1024 * 1024


class Raw:
    """Bytes in the place of a message."""

    def __init__(self, data):
        self._data = data

    def SerializeToString(self):  # noqa: N802 - protobuf's name
        return self._data


async def test_a_message_over_32_mib_is_out_of_range(client):
    call = client.channel.unary(GENERATE, pb.GenerateResponse, pb.GenerateRequest(text="x" * LIMIT))
    assert (await refusal(call))[0] is Status.OUT_OF_RANGE


async def test_a_message_of_almost_32_mib_is_read(client):
    # Read, and then refused for what it says.
    call = client.channel.unary(GENERATE, pb.GenerateResponse, request(f'request_id: "{"x" * (LIMIT - 1000)}" model: "nope"'))
    assert (await refusal(call))[0] is Status.NOT_FOUND


async def test_bytes_that_are_no_message_are_an_internal_error(client):
    call = client.channel.unary(GENERATE, pb.GenerateResponse, Raw(b"\xff\xff\xff"))
    status, message = await refusal(call)
    assert status is Status.INTERNAL
    assert message.startswith("failed to decode Protobuf message")


@pytest.mark.parametrize("path", ["/vllm.Inference/Nope", "/vllm.Nope/Generate"])
async def test_an_unknown_method_is_unimplemented(client, path):
    assert (await refusal(client.channel.unary(path, pb.GenerateResponse, request())))[0] is Status.UNIMPLEMENTED


def test_compressed_messages_are_unimplemented(worker):
    with grpc.insecure_channel(worker.grpc, compression=grpc.Compression.Gzip) as channel:
        call = channel.unary_unary(GENERATE, pb.GenerateRequest.SerializeToString, pb.GenerateResponse.FromString)
        with pytest.raises(grpc.RpcError) as caught:
            call(request('request_id: "' + "x" * 5000 + '"'), timeout=20)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_the_connection_outlives_everything_that_was_refused(client):
    for message in (Raw(b"\xff\xff\xff"), pb.GenerateRequest(text="x" * LIMIT), request("temperature: 9")):
        await refusal(client.channel.unary(GENERATE, pb.GenerateResponse, message))
        assert (await client.channel.unary(GENERATE, pb.GenerateResponse, request())).outputs.num_tokens == 4
    assert client.channel.connections == 1
