"""The outputs of a streamed call on their way from the lane to the client."""

from time import perf_counter

from core.call import Call, Outcome
from core.registry import Registry
from core.reply import Output
from core.versions import StreamedVersions
from core.wire.lane import OutputStream


class LiftedStream:
    """The outputs of a streamed call after the plugins have seen them."""

    def __init__(
        self, source: OutputStream, call: Call, outcome: Outcome, registry: Registry, versions: StreamedVersions | None = None
    ) -> None:
        self._source = source
        self._call = call
        self._outcome = outcome
        self._registry = registry
        self._versions = versions
        self._first: list[Output] | None = None

    async def start(self) -> None:
        """Wait for the first output. Raises: `CallError`; `WorkerLost` when another worker may do better."""
        self._first = await self._next()
        self._outcome.first_output_seconds = perf_counter() - self._call.started

    async def receive(self) -> list[Output]:
        """Everything that has arrived, at least one output; an empty list is the end.

        Cancellation: nothing is lost.
        Raises: `CallError`.
        """
        if self._first is not None:
            outputs, self._first = self._first, None
        else:
            outputs = await self._next()
        for output in outputs:
            try:
                self._registry.call("lift_output", call=self._call, output=output)
            finally:
                self._count(output)
        return outputs

    def release(self) -> None:
        """Reset the call on the worker at once, whatever the reader is doing."""
        self._source.release()

    async def _next(self) -> list[Output]:
        if self._versions is None:
            return await self._source.receive()
        self._versions.wait()
        outputs = await self._source.receive()
        self._versions.tell(outputs)
        return outputs

    def _count(self, output: Output) -> None:
        outcome = self._outcome
        outcome.output_tokens += len(output.choice.token_ids)
        outcome.prompt_tokens = output.prompt_tokens or outcome.prompt_tokens
        if output.cached_tokens is not None:
            outcome.cached_tokens = output.cached_tokens
