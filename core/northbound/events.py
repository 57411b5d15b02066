"""The server-sent events of a streamed call: one per engine output, all that are there in one write, and comments while there is none."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec
import trio

from core.call import Call, Outcome
from core.errors import CallError
from core.northbound.headers import encode_headers
from core.reply import GenerateChunk, Output, PromptTokensDetails, Usage
from core.serving.client import Client

_DONE: Final = b"data: [DONE]\n\n"
_COMMENT: Final = b": keep-alive\n\n"
_encoder = msgspec.json.Encoder()


class EventStream:
    """Writes one streamed reply. The response starts with the first event or comment; until then it can still become an error's.

    `headers` are asked for when it starts. `interval`, in seconds, is how long it may be idle before a comment; 0 for no comments.
    """

    def __init__(self, call: Call, outcome: Outcome, client: Client, headers: Callable[[], Mapping[str, str]], interval: float) -> None:
        self._call = call
        self._outcome = outcome
        self._client = client
        self._headers = headers
        self._interval = interval
        self._written = trio.current_time()
        self._writing = trio.Lock()
        self._ended = False
        self._output_tokens = 0
        self.started = False

    async def keep_alive(self) -> None:
        """Write a comment whenever nothing was written for an interval. Runs beside the writing, until cancelled."""
        while self._interval:
            await trio.sleep_until(self._written + self._interval)
            if self._ended:
                break
            if self._writing.locked():  # a client that reads slowly needs no comment
                self._written = trio.current_time()
            elif trio.current_time() >= self._written + self._interval:
                await self._send(_COMMENT)
        await trio.sleep_forever()

    async def write(self, outputs: Sequence[Output]) -> None:
        """One event for each output, in one write."""
        await self._send(b"".join(map(self._event, outputs)))

    async def finish(self) -> None:
        """The usage, if it was asked for, and the end."""
        usage = b""
        if self._call.stream_options.include_usage:
            usage = _data(GenerateChunk(request_id=self._call.id, choices=[], usage=self._usage(self._outcome.output_tokens)))
        await self._send(usage + _DONE, last=True)

    async def fail(self, error: CallError) -> None:
        """End a response that has started with an error, as vLLM does: an event with the error's body, then the usual end."""
        await self._send(_data(error.body) + _DONE, last=True)

    def _event(self, output: Output) -> bytes:
        # Counted here once more: the outcome knows of the later outputs of this write already.
        self._output_tokens += len(output.choice.token_ids)
        return _data(
            GenerateChunk(
                request_id=self._call.id,
                choices=[output.choice],
                usage=self._usage(self._output_tokens) if self._call.stream_options.continuous_usage_stats else None,
                prompt_logprobs=output.prompt_logprobs,
                prompt_token_ids=output.prompt_token_ids,
                mm_placeholders=output.mm_placeholders,
                kv_transfer_params=output.kv_transfer_params,
                ec_transfer_params=output.ec_transfer_params,
            )
        )

    def _usage(self, output_tokens: int) -> Usage:
        prompt_tokens, cached = self._outcome.prompt_tokens, self._outcome.cached_tokens
        return Usage(
            prompt_tokens,
            output_tokens,
            prompt_tokens + output_tokens,
            None if cached is None else PromptTokensDetails(cached),
        )

    async def _send(self, data: bytes, *, last: bool = False) -> None:
        try:
            self._writing.acquire_nowait()
        except trio.WouldBlock:  # a comment is under way
            await self._writing.acquire()
        try:
            self._ended = last
            self._written = trio.current_time()
            if not self.started:
                self.started = True
                await self._client.send({"type": "http.response.start", "status": 200, "headers": self._head()})
            await self._client.send({"type": "http.response.body", "body": data, "more_body": not last})
        finally:
            self._writing.release()

    def _head(self) -> list[tuple[bytes, bytes]]:
        head = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        return head + encode_headers(self._headers())


def _data(value: msgspec.Struct) -> bytes:
    return b"data: " + _encoder.encode(value) + b"\n\n"
