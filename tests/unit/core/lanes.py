"""A lane in memory: it answers from a script, and notes what it was asked and what became of it."""

from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import trio

from core.call import Call
from core.reply import ChunkChoice, FinishReason, Logprobs, Output
from core.wire.generated.inference_pb2 import GenerateRequest
from core.wire.grpc_lowering import lower_to_grpc
from core.wire.needs import GRPC_CAN, Wire

#: Outputs are sent, an exception is raised, an event is waited for.
Step = Output | list[Output] | Exception | trio.Event
Script = Sequence[Step]


def output(*token_ids: int, finish: FinishReason | None = None, prompt: int | None = 3, **fields: Any) -> Output:
    """A message of the worker; with `finish` it is the last one."""
    logprobs: Logprobs | None = fields.pop("logprobs", None)
    choice = ChunkChoice(index=fields.pop("index", 0), token_ids=list(token_ids), finish_reason=finish, logprobs=logprobs)
    fields.setdefault("completion_tokens", len(token_ids) if finish else None)
    return Output(choice=choice, prompt_tokens=prompt, **fields)


class RefusedAtEntry(Exception):
    """In a script: what stands in it is raised when the stream is opened, as an HTTP connection that fails does."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class ScriptedLane:
    """`core.wire.lane.Lane`. Request number k follows script number k (output number k, of a call that wants several); the last
    script is for all that come after.

    `max_model_len` is 100.
    """

    def __init__(self, *scripts: Script, wire: Wire = "grpc", can: frozenset[str] = GRPC_CAN) -> None:
        self.wire: Wire = wire
        self.can = can
        self.requests: list[GenerateRequest] = []
        #: Requests that are on the worker now, and the most that were there at once.
        self.open = 0
        self.most_open = 0
        #: Requests that ended before their script did.
        self.cancelled = 0
        self.released = 0
        #: Data-parallel ranks that calls were sent to, where they were sent to one.
        self.ranks: list[int] = []
        self._scripts = scripts

    def at_rank(self, rank: int) -> "ScriptedLane":
        self.ranks.append(rank)
        return self

    def lower(self, call: Call, index: int) -> GenerateRequest:
        return lower_to_grpc(call, index=index, max_model_len=100)

    async def generate(self, call: Call, request: GenerateRequest, index: int) -> Output:
        with self._asked(call, request, index) as script:
            whole: list[Output] = []
            for step in script:
                await trio.lowlevel.checkpoint()
                whole += await _outputs(step, index)
            return whole[-1]

    @asynccontextmanager
    async def stream(self, call: Call, request: GenerateRequest, index: int) -> AsyncGenerator["ScriptedStream", None]:
        with self._asked(call, request, index) as script:
            if script and isinstance(refused := script[0], RefusedAtEntry):
                raise refused.error
            stream = ScriptedStream(self, script, index)
            yield stream
            self.cancelled += bool(stream.left)

    @contextmanager
    def _asked(self, call: Call, request: GenerateRequest, index: int) -> Generator[Script, None, None]:
        number = index if (call.sampling.n or 1) > 1 else len(self.requests)
        self.requests.append(request)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            yield self._scripts[min(number, len(self._scripts) - 1)]
        except trio.Cancelled:
            self.cancelled += 1
            raise
        finally:
            self.open -= 1


class ScriptedStream:
    """`core.wire.lane.OutputStream`."""

    def __init__(self, lane: ScriptedLane, script: Script, index: int) -> None:
        self._lane = lane
        self.left = list(script)
        self._index = index

    async def receive(self) -> list[Output]:
        await trio.lowlevel.checkpoint()
        while self.left:
            outputs = await _outputs(self.left[0], self._index)
            self.left.pop(0)
            if outputs:
                return outputs
        return []

    def release(self) -> None:
        self._lane.released += 1


async def _outputs(step: Step, index: int) -> list[Output]:
    match step:
        case trio.Event():
            await step.wait()
            return []
        case Exception():
            raise step
        case Output():
            step.choice.index = index
            return [step]
        case _:
            return step
