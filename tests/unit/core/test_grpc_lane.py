"""Calls over gRPC: which messages become outputs, and what the channel's errors become. The channel's own tests are elsewhere."""

from contextlib import asynccontextmanager
from typing import Any

import pytest

from core.errors import CallError, WorkerLost, from_grpc
from core.wire import ConnectionLost, GRPCError, Status
from core.wire.generated.inference_pb2 import FinishInfo, GenerateResponse, PromptInfo, SequenceOutput
from core.wire.grpc_lane import GrpcLane
from tests.unit.core.rig import make_call

PROMPT = GenerateResponse(prompt_info=PromptInfo(num_prompt_tokens=3))


def tokens(*ids, finish=False):
    message = GenerateResponse(outputs=SequenceOutput(token_ids=ids))
    if finish:
        message.outputs.finish_info.CopyFrom(FinishInfo(num_output_tokens=9, finish_reason=FinishInfo.STOP))
    return message


class Channel:
    """A channel whose stream gives these batches of messages; an exception is raised in its turn."""

    def __init__(self, *batches: Any):
        self.batches = list(batches)
        self.metadata = None
        self.cancelled = 0

    async def unary(self, name, reply_type, message, *, metadata):
        self.metadata = metadata
        return reply_type.FromString(self._next().SerializeToString())

    @asynccontextmanager
    async def request(self, name, cardinality, request_type, reply_type, *, metadata):
        self.metadata = metadata
        yield self

    async def send_message(self, message, *, end):
        assert end

    async def recv_messages(self):
        return self._next() if self.batches else []

    def cancel(self):
        self.cancelled += 1

    def _next(self):
        batch = self.batches.pop(0)
        if isinstance(batch, Exception):
            raise batch
        return batch


async def generate(channel, rank=None, **fields):
    lane = GrpcLane(channel, max_model_len=100)
    if rank is not None:
        lane = lane.at_rank(rank)
    call = make_call(**fields)
    return await lane.generate(call, lane.lower(call, 0), 0)


async def stream(channel, **fields):
    lane = GrpcLane(channel, max_model_len=100)
    call = make_call(stream=True, **fields)
    batches = []
    async with lane.stream(call, lane.lower(call, 0), 0) as source:
        while batch := await source.receive():
            batches.append(batch)
        assert await source.receive() == []
    return [[(output.choice.token_ids, output.prompt_tokens) for output in batch] for batch in batches]


async def test_the_prompts_message_is_held_back_for_the_first_output():
    assert await stream(Channel([PROMPT], [tokens(7)], [tokens(8, finish=True)])) == [[([7], 3)], [([8], None)]]


async def test_messages_that_arrive_together_are_outputs_together():
    assert await stream(Channel([PROMPT, tokens(7), tokens(8, finish=True)])) == [[([7], 3), ([8], None)]]


async def test_an_answer_in_one_message_needs_no_other():
    both = GenerateResponse(prompt_info=PROMPT.prompt_info)
    both.MergeFrom(tokens(7, finish=True))
    assert await stream(Channel([both])) == [[([7], 3)]]


async def test_a_last_message_without_tokens_still_ends_the_stream():
    assert await stream(Channel([PROMPT], [tokens(7)], [tokens(finish=True)])) == [[([7], 3)], [([], None)]]


@pytest.mark.parametrize("batches", [[], [[PROMPT]], [[PROMPT], [tokens(7)]]])
async def test_a_stream_that_ends_without_a_finish_is_a_failure(batches):
    with pytest.raises(CallError, match="without a finish reason"):
        await stream(Channel(*batches))


@pytest.mark.parametrize("before", [[], [[PROMPT]], [[PROMPT], [tokens(7)]]])
async def test_an_error_of_the_worker_keeps_its_words(before):
    with pytest.raises(CallError, match="no such thing") as raised:
        await stream(Channel(*before, GRPCError(Status.NOT_FOUND, "no such thing")))
    assert raised.value.status == 404


async def test_a_lost_connection_is_a_lost_worker_on_both_ways():
    with pytest.raises(WorkerLost, match="reset"):
        await generate(Channel(ConnectionLost("reset", sent=True)))
    with pytest.raises(WorkerLost, match="reset"):
        await stream(Channel(ConnectionLost("reset", sent=True)))


async def test_the_rank_goes_as_metadata_and_only_when_there_is_one():
    channel = Channel(tokens(7, finish=True))
    await generate(channel, rank=0)
    assert channel.metadata == {"x-data-parallel-rank": "0"}
    channel = Channel(tokens(7, finish=True))
    await generate(channel)
    assert channel.metadata is None


async def test_a_stream_can_be_released_more_than_once():
    channel = Channel([tokens(7, finish=True)])
    lane = GrpcLane(channel, max_model_len=100)  # pyright: ignore[reportArgumentType]
    call = make_call(stream=True)
    async with lane.stream(call, lane.lower(call, 0), 0) as source:
        source.release()
        source.release()
    assert channel.cancelled == 2


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (Status.INVALID_ARGUMENT, 400),
        (Status.FAILED_PRECONDITION, 400),
        (Status.NOT_FOUND, 404),
        (Status.ALREADY_EXISTS, 409),
        (Status.RESOURCE_EXHAUSTED, 413),
        (Status.OUT_OF_RANGE, 413),
        (Status.UNIMPLEMENTED, 501),
        (Status.DEADLINE_EXCEEDED, 504),
        (Status.CANCELLED, 499),
        (Status.INTERNAL, 500),
        (Status.UNKNOWN, 500),
        (Status.DATA_LOSS, 500),
    ],
)
def test_each_status_is_an_http_status_with_a_whole_body(status, code):
    error = from_grpc(GRPCError(status, "text"))
    assert (error.status, error.body.error.message, error.body.error.code) == (code, "text", code)
    assert error.body.error.type
    assert not isinstance(error, WorkerLost)


def test_unavailable_is_a_lost_worker():
    error = from_grpc(GRPCError(Status.UNAVAILABLE, None))
    assert isinstance(error, WorkerLost)
    assert (error.status, error.message, error.retry_after) == (503, "UNAVAILABLE", 1)
