"""A worker in memory: it answers at once, and notes what it was asked."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from copy import copy
from typing import Any

import trio

from core.call import Call
from core.errors import CallError
from core.fleet.worker import Worker
from core.reply import ChunkChoice, Output
from core.settings import Role
from core.testing.objects import make_worker
from core.wire.generated.inference_pb2 import GenerateRequest
from core.wire.grpc_lowering import lower_to_grpc
from core.wire.needs import GRPC_CAN, Wire

_MAX_MODEL_LEN = 4096


class RecordingLane:
    """`core.wire.lane.Lane`: every output is the tokens 1, 2, 3, … as many as `max_tokens` says, at most sixteen."""

    wire: Wire = "grpc"

    def __init__(self, can: frozenset[str] = GRPC_CAN) -> None:
        self.can = can
        #: The calls that came here, and what came of each after every plugin's `lower_call`.
        self.calls: list[Call] = []
        self.requests: list[GenerateRequest] = []
        #: The data-parallel rank of each of them, as the policy has chosen it, or the client; `None`: it was left to the worker.
        self.ranks: list[int | None] = []
        #: Raised by the next call, and by no other: `WorkerLost("…")` lets the call be tried elsewhere.
        self.next_error: CallError | None = None
        self._rank: int | None = None
        self._noting = self

    def at_rank(self, rank: int) -> "RecordingLane":
        """The same for that rank: its calls are noted here."""
        lane = copy(self)
        lane._rank = rank
        return lane

    def lower(self, call: Call, index: int) -> GenerateRequest:
        """As every gRPC lane does."""
        return lower_to_grpc(call, index=index, max_model_len=_MAX_MODEL_LEN)

    async def generate(self, call: Call, request: GenerateRequest, index: int) -> Output:
        """Answer. Raises: `next_error`."""
        await trio.lowlevel.checkpoint()
        self._noting._note(call, request, self._rank)
        return _output(call, index, list(range(1, _length(call) + 1)), _length(call))

    @asynccontextmanager
    async def stream(self, call: Call, request: GenerateRequest, index: int) -> AsyncGenerator["_Tokens", None]:
        """Answer token by token. Raises: `next_error`."""
        await trio.lowlevel.checkpoint()
        self._noting._note(call, request, self._rank)
        yield _Tokens(call, index)

    def _note(self, call: Call, request: GenerateRequest, rank: int | None) -> None:
        if self.next_error:
            error, self.next_error = self.next_error, None
            raise error
        self.calls.append(call)
        self.requests.append(request)
        self.ranks.append(rank)


class _Tokens:
    """`core.wire.lane.OutputStream`."""

    def __init__(self, call: Call, index: int) -> None:
        self._call = call
        self._index = index
        self._sent = 0

    async def receive(self) -> list[Output]:
        await trio.lowlevel.checkpoint()
        if self._sent == _length(self._call):
            return []
        self._sent += 1
        return [_output(self._call, self._index, [self._sent], self._sent)]

    def release(self) -> None:
        """There is nobody to tell."""


def recording_worker(name: str, role: Role = "aggregated", **info: Any) -> tuple[Worker, RecordingLane]:
    """A worker that has not joined yet, and its lane; `info` are fields of `WorkerInfo`."""
    lane = RecordingLane()
    return make_worker(name, lane, state="starting", role=role, **info), lane


def _length(call: Call) -> int:
    return min(call.sampling.max_tokens or 16, 16)


def _output(call: Call, index: int, token_ids: list[int], so_far: int) -> Output:
    finish = "length" if so_far == _length(call) else None
    choice = ChunkChoice(index=index, token_ids=token_ids, finish_reason=finish)
    return Output(choice=choice, prompt_tokens=len(call.token_ids), cached_tokens=0, completion_tokens=so_far)
