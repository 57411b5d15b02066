"""An answer of vLLM's generate route, of either of its servers, as an `Output`."""

from typing import Any

import msgspec
from msgspec import Struct, field

from core.call import Call
from core.errors import CallError, from_code
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


class _Candidate(Struct, gc=False):
    """A token with its logprob. vLLM up to 0.31 names it only by `token` (`token_id:5`) and tells no rank."""

    logprob: float
    token_id: int | None = None
    token: str = ""
    rank: int | None = None

    def as_top(self) -> TopLogprob:
        token_id = int(self.token.removeprefix("token_id:")) if self.token_id is None else self.token_id
        return TopLogprob(token_id, self.logprob, self.rank)


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


class _Error(Struct):
    message: str = ""
    code: int | str = 500
    param: str | None = None


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
    error: _Error | None = None


_answers = msgspec.json.Decoder(_Answer)


def lift_from_http(call: Call, data: bytes | str, index: int) -> Output:
    """A reply, or the data of one event, as output number `index` of the call.

    An event without choices, the one with the usage, is an output without tokens.

    Raises: `CallError`; with 502 for what can't be read.
    """
    try:
        answer = _answers.decode(data)
        choice = _choice(answer.choices[0], index) if answer.choices else None
    except (ValueError, RecursionError) as error:  # msgspec's are ValueErrors
        raise CallError(502, f"the worker's answer can't be read: {error}") from error
    if answer.error is not None:
        raise from_code(answer.error.code, answer.error.message, param=answer.error.param)
    if choice is None:
        if not call.stream:
            raise CallError(502, "the worker's answer has no choices")
        choice = ChunkChoice(index=index, token_ids=[])
    usage = answer.usage
    details = usage.prompt_tokens_details if usage else None
    whole = None if call.stream else len(choice.token_ids)
    return Output(
        choice=choice,
        # The ids that came back are more than those that were sent when a medium was expanded into its placeholders.
        prompt_tokens=usage.prompt_tokens if usage else len(answer.prompt_token_ids or call.token_ids),
        cached_tokens=details.cached_tokens if details else None,
        completion_tokens=usage.completion_tokens if usage else whole,
        prompt_logprobs=_own_token_first(answer.prompt_logprobs, answer.prompt_token_ids or call.token_ids),
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
    return TokenLogprob(own.token_id, own.logprob, own.rank, f"token_id:{own.token_id}", [own, *others])


def _own_token_first(positions: PromptLogprobs | None, token_ids: list[int]) -> PromptLogprobs | None:
    """The Rust server sends each position's entries in no order; clients read the first one as the prompt's own token."""
    for token_id, position in zip(token_ids, positions or (), strict=False):
        if position and (own := position.pop(str(token_id), None)):
            rest = dict(position)
            position.clear()
            position |= {str(token_id): own, **rest}
    return positions
