"""From a generate body to a call, with vllm-rs 0.33.0's checks in its order, and its defaults for what is absent."""

from typing import Any, TypeVar
from uuid import uuid4

import msgspec

from plugins.stand_in.engine.adapters import Adapter, Adapters
from plugins.stand_in.engine.call import Call, Sampling
from plugins.stand_in.engine.refusal import Problem, Refused, invalid
from plugins.stand_in.engine.text import encode
from plugins.stand_in.options import Options
from plugins.stand_in.over_http.body import Body, SamplingParams
from plugins.stand_in.over_http.errors import Malformed

_T = TypeVar("_T")

_CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


def to_call(body: Body, request_id: str | None, options: Options, adapters: Adapters, rank: int | None = None) -> Call:
    """Read a body; `request_id` is the header's, which wins, and so is `rank`. Raises `Malformed`. Refused: NOT_FOUND (model), INVALID."""
    adapter = _adapter(body.model, options, adapters)
    _check(body)
    params = body.sampling_params
    return Call(
        request_id=request_id or (uuid4().hex[:8] if body.request_id is None else body.request_id),
        prompt=body.token_ids,
        sampling=_sampling(params),
        adapter=adapter,
        data_parallel_rank=rank,
        salt=body.cache_salt,
        bypass_prefix_cache=bool(params.skip_reading_prefix_cache),
        stream_interval=max(params.stream_interval or 1, options.stream_interval),
        kv_transfer_params=body.kv_transfer_params,
    )


def _adapter(model: str | None, options: Options, adapters: Adapters) -> Adapter | None:
    """A LoRA adapter is chosen by its name in `model`."""
    if model is None or model in options.names:
        return None
    if (adapter := adapters.find(model)) is None:
        raise Refused(Problem.NOT_FOUND, f"The model `{model}` does not exist.", param="model")
    return adapter


def _check(body: Body) -> None:
    params = body.sampling_params
    if params.n not in {None, 1}:
        raise invalid("Only n=1 is supported.", param="n")
    if params.stop:
        raise invalid("stop is not supported.", param="stop")
    for name in ("include_stop_str_in_output", "trace_decode_token_ids"):
        if getattr(params, name):
            raise invalid(f"{name} is not supported.", param=name)
    if body.output_mode != "tokens":
        raise invalid('Only output_mode="tokens" is supported.', param="output_mode")
    if not body.token_ids:
        raise invalid("token_ids must contain at least one token id.", param="token_ids")
    if body.content_parts:
        raise invalid("content_parts: the model takes text only", param="content_parts")
    if params.max_tokens == 0:
        raise invalid("max_tokens must be greater than 0.", param="sampling_params")
    for name in ("prompt_logprobs", "prompt_logprob_token_ids"):
        if body.stream and getattr(params, name) is not None:
            raise invalid(f"{name} are not available when stream=true.", param="sampling_params")
    if params.prompt_logprob_token_ids is not None:
        raise invalid("prompt_logprob_token_ids: the stand-in can't score them", param="sampling_params")
    if params.prompt_logprob_start is not None:
        raise invalid("prompt_logprob_start requires prompt_logprob_token_ids.")
    if params.allowed_token_ids is not None and not params.allowed_token_ids:
        raise invalid("allowed_token_ids should not be empty")
    if params.routed_experts_prompt_start > len(body.token_ids):
        raise invalid(
            f"routed_experts_prompt_start must be 0 to the prompt's length ({len(body.token_ids)}), "
            f"got {params.routed_experts_prompt_start}"
        )


def _sampling(params: SamplingParams) -> Sampling:
    return Sampling(
        temperature=_or(params.temperature, 1.0),
        top_k=_or(params.top_k, 0),
        top_p=_or(params.top_p, 1.0),
        min_p=_or(params.min_p, 0.0),
        seed=None if params.seed == -1 else params.seed,
        presence_penalty=_or(params.presence_penalty, 0.0),
        frequency_penalty=_or(params.frequency_penalty, 0.0),
        repetition_penalty=_or(params.repetition_penalty, 1.0),
        allowed_token_ids=params.allowed_token_ids,
        bad_words=[*(params.bad_words_token_ids or ()), *map(encode, params.bad_words or ())],
        structured_output=_structured_output(params.structured_outputs),
        thinking_token_budget=params.thinking_token_budget,
        max_tokens=params.max_tokens,
        min_tokens=_or(params.min_tokens, 0),
        stop_token_ids=params.stop_token_ids or (),
        ignore_eos=params.ignore_eos,
        logprobs=params.logprobs,
        logprob_token_ids=params.logprob_token_ids,
        prompt_logprobs=params.prompt_logprobs,
    )


def _structured_output(given: dict[str, Any] | None) -> tuple[str, Any] | None:
    if given is None:
        return None
    kinds = [kind for kind in _CONSTRAINTS if given.get(kind) is not None]
    if len(kinds) != 1:
        raise Malformed(f"structured_outputs: give exactly one of {', '.join(_CONSTRAINTS)}; got {kinds}")
    kind, value = kinds[0], given[kinds[0]]
    if kind == "json" and isinstance(value, str):
        try:
            msgspec.json.decode(value)
        except msgspec.DecodeError as error:
            raise Malformed(f"structured_outputs.json: {error}") from error
    return kind, value


def _or(value: _T | None, default: _T) -> _T:
    return default if value is None else value
