"""Calls over a worker's HTTP server: `/inference/v1/generate`, for what gRPC can't carry and for workers without gRPC."""

import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from typing import Any

import httpx
import msgspec
from msgspec import Struct, field

from core.call import Call
from core.errors import CallError, WorkerLost, from_http
from core.reply import (
    ChunkChoice,
    FinishReason,
    Logprobs,
    Output,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
    Usage,
    WeightVersion,
)
from core.wire.needs import Wire

PATH = "/inference/v1/generate"
_EVENT = "data: "
_DONE = "[DONE]"


class _Candidate(Struct, gc=False):
    """A token with its logprob. vLLM up to 0.31 names it only by `token` (`token_id:5`) and tells no rank."""

    logprob: float
    token_id: int | None = None
    token: str = ""
    rank: int | None = None

    def as_top(self) -> TopLogprob:
        token_id = int(self.token.removeprefix("token_id:")) if self.token_id is None else self.token_id
        return TopLogprob(token_id, self.logprob, self.rank, f"token_id:{token_id}")


class _Entry(_Candidate, gc=False):
    top_logprobs: list[_Candidate] = field(default_factory=list[_Candidate])


class _Content(Struct):
    content: list[_Entry]


class _Choice(Struct):
    token_ids: list[int]
    logprobs: _Content | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    routed_experts: Any = None
    sampling_mask: list[list[int]] | None = None
    weight_versions: list[WeightVersion] | None = None


class _Answer(Struct):
    """A reply or a chunk of either of vLLM's servers; each leaves out what the other sends."""

    choices: list[_Choice] = field(default_factory=list[_Choice])
    usage: Usage | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_id_logprobs: str | None = None
    prompt_token_ids: list[int] | None = None
    mm_placeholders: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    metrics: dict[str, Any] | None = None
    error: msgspec.Raw | None = None


_answers = msgspec.json.Decoder(_Answer)


class HttpLane:
    """`core.wire.lane.Lane` over a client whose base URL is the worker's. `max_model_len` is the worker's, in tokens."""

    wire: Wire = "http"

    def __init__(self, client: httpx.AsyncClient, *, can: frozenset[str], max_model_len: int) -> None:
        self._client = client
        self._max_model_len = max_model_len
        self.can = can

    def lower(self, call: Call, index: int) -> dict[str, Any]:
        """See `Lane`."""
        return lower_to_http(call, index=index, max_model_len=self._max_model_len)

    async def generate(self, call: Call, request: dict[str, Any], index: int) -> Output:
        """See `Lane`."""
        try:
            response = await self._client.send(self._request(call, request))
        except httpx.HTTPError as error:
            raise _lost(error) from error
        if response.status_code != HTTPStatus.OK:
            raise from_http(response.status_code, response.content)
        return _lift(call, _decode(response.content), index)

    @asynccontextmanager
    async def stream(self, call: Call, request: dict[str, Any], index: int) -> AsyncGenerator["HttpOutputStream", None]:
        """See `Lane`."""
        try:
            response = await self._client.send(self._request(call, request), stream=True)
        except httpx.HTTPError as error:
            raise _lost(error) from error
        try:
            if response.status_code != HTTPStatus.OK:
                raise from_http(response.status_code, await response.aread())
            yield HttpOutputStream(response, call, index)
        finally:
            await response.aclose()

    def _request(self, call: Call, request: dict[str, Any]) -> httpx.Request:
        headers = {"content-type": "application/json"}
        if call.data_parallel_rank is not None:
            headers["x-data-parallel-rank"] = str(call.data_parallel_rank)
        if call.session_id:
            headers["x-session-id"] = call.session_id
        return self._client.build_request("POST", PATH, content=msgspec.json.encode(request), headers=headers)


class HttpOutputStream:
    """`core.wire.lane.OutputStream` over server-sent events."""

    def __init__(self, response: httpx.Response, call: Call, index: int) -> None:
        self._response = response
        self._lines = response.aiter_lines()
        self._call = call
        self._index = index

    async def receive(self) -> list[Output]:
        """See `OutputStream`."""
        try:
            async for line in self._lines:
                if not line.startswith(_EVENT):
                    continue
                data = line.removeprefix(_EVENT)
                if data == _DONE:
                    return []
                return [_lift(self._call, _decode(data), self._index)]
        except httpx.HTTPError as error:
            raise _lost(error) from error
        raise WorkerLost("the worker closed the stream before its end")

    def release(self) -> None:
        """See `OutputStream`. The worker sees the connection end; who reads from it sees the same."""
        network: socket.socket | None = self._response.extensions["network_stream"].get_extra_info("socket")
        if network is not None:
            with suppress(OSError):  # ended already
                network.shutdown(socket.SHUT_RDWR)


def lower_to_http(call: Call, *, index: int, max_model_len: int) -> dict[str, Any]:
    """The JSON body for output number `index` of a call, with the same meaning of what is omitted as over gRPC."""
    sampling: dict[str, Any] = msgspec.to_builtins(call.sampling)
    single = sampling.pop("n", 1) == 1
    sampling.setdefault("temperature", 1.0)
    sampling.setdefault("max_tokens", max(max_model_len - len(call.token_ids), 1))
    if "logprob_token_ids" in sampling:  # without a count the Rust server drops them from its answer
        sampling["logprobs"] = len(sampling["logprob_token_ids"])
    if sampling.get("top_k") == -1:  # the Rust server takes no −1; 0 means the same
        sampling["top_k"] = 0
    if sampling.get("seed", -1) != -1:
        sampling["seed"] += index
    body: dict[str, Any] = {
        "request_id": call.id if single else f"{call.id}-{index}",
        "model": call.adapter or call.model or None,
        "token_ids": call.token_ids,
        "sampling_params": sampling,
        "cache_salt": call.cache_salt or None,
        "priority": call.priority,
        "kv_transfer_params": call.kv_transfer_params,
        "ec_transfer_params": call.ec_transfer_params,
        "return_token_ids": call.return_token_ids or None,
        "reasoning_ended": call.reasoning_ended,
        "reasoning_parser_kwargs": msgspec.to_builtins(call.reasoning_parser_kwargs),
    }
    if call.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return {key: value for key, value in body.items() if value is not None}


def _decode(data: bytes | str) -> _Answer:
    try:
        answer = _answers.decode(data)
    except msgspec.MsgspecError as error:
        raise CallError(502, f"the worker's answer can't be read: {error}") from error
    if answer.error is not None:
        raise _error_in_stream(bytes(answer.error))
    return answer


class _StreamError(Struct):
    message: str = ""
    code: int | str = 500


def _error_in_stream(raw: bytes) -> CallError:
    error = msgspec.json.decode(raw, type=_StreamError)
    code = error.code if isinstance(error.code, int) else 500
    return WorkerLost(error.message) if code == HTTPStatus.SERVICE_UNAVAILABLE else CallError(code, error.message)


def _lift(call: Call, answer: _Answer, index: int) -> Output:
    choice = _choice(answer.choices[0], index) if answer.choices else ChunkChoice(index=index, token_ids=[])
    usage = answer.usage
    details = usage.prompt_tokens_details if usage else None
    whole = None if call.stream else len(choice.token_ids)
    return Output(
        choice=choice,
        prompt_tokens=usage.prompt_tokens if usage else len(call.token_ids),
        cached_tokens=details.cached_tokens if details else None,
        completion_tokens=usage.completion_tokens if usage else whole,
        prompt_logprobs=_own_token_first(answer.prompt_logprobs, call.token_ids),
        prompt_token_id_logprobs=answer.prompt_token_id_logprobs,
        prompt_token_ids=answer.prompt_token_ids,
        mm_placeholders=answer.mm_placeholders,
        kv_transfer_params=answer.kv_transfer_params,
        ec_transfer_params=answer.ec_transfer_params,
        metrics=answer.metrics,
    )


def _choice(part: _Choice, index: int) -> ChunkChoice:
    if part.finish_reason == "error":  # over gRPC this is a status, and there is no reason to tell it less clearly
        raise CallError(500, "engine failed during generation")
    return ChunkChoice(
        index=index,
        token_ids=part.token_ids,
        logprobs=part.logprobs and Logprobs([_entry(entry) for entry in part.logprobs.content]),
        finish_reason=part.finish_reason,
        stop_reason=part.stop_reason,
        routed_experts=part.routed_experts,
        sampling_mask=part.sampling_mask,
        weight_versions=part.weight_versions,
    )


def _entry(entry: _Entry) -> TokenLogprob:
    own = entry.as_top()
    # vLLM up to 0.31 repeats the sampled token among its candidates; later ones don't.
    others = [top for candidate in entry.top_logprobs if (top := candidate.as_top()).token_id != own.token_id]
    return TokenLogprob(own.token_id, own.logprob, own.rank, own.token, [own, *others])


def _own_token_first(positions: PromptLogprobs | None, token_ids: list[int]) -> PromptLogprobs | None:
    """The Rust server sends each position's entries in no order; clients read the first one as the prompt's own token."""
    for token_id, position in zip(token_ids, positions or (), strict=False):
        if position and (own := position.pop(str(token_id), None)):
            rest = dict(position)
            position.clear()
            position |= {str(token_id): own, **rest}
    return positions


def _lost(error: httpx.HTTPError) -> WorkerLost:
    return WorkerLost(f"the worker's HTTP server can't be reached: {error or type(error).__name__}")
