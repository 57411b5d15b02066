"""The body of `POST /inference/v1/generate`: its fields and their types, as vllm-rs 0.33.0 reads them."""

from typing import Annotated, Any, Literal

import msgspec

U32 = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
I32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
I64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class SamplingParams(msgspec.Struct):
    """`sampling_params`; unknown keys are ignored.

    `logit_bias` can't be given: vllm-rs 0.33.0 refuses every JSON key there.
    """

    temperature: float | None = None
    top_k: U32 | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: I64 | None = None
    max_tokens: U32 | None = None
    min_tokens: U32 | None = None
    thinking_token_budget: I64 | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[U32] | None = None
    ignore_eos: bool = False
    allowed_token_ids: list[U32] | None = None
    bad_words: list[str] | None = None
    bad_words_token_ids: list[list[U32]] | None = None
    logit_bias: dict[Literal["(no key is accepted)"], float] | None = None
    structured_outputs: dict[str, Any] | None = None
    logprobs: I32 | None = None
    prompt_logprobs: I32 | None = None
    logprob_token_ids: list[U32] | None = None
    prompt_logprob_token_ids: list[list[U32]] | None = None
    prompt_logprob_start: U32 | None = None
    skip_reading_prefix_cache: bool | None = None
    routed_experts_prompt_start: U32 = 0
    stream_interval: Annotated[int, msgspec.Meta(ge=1, le=2**32 - 1)] | None = None
    n: U32 | None = None
    stop: str | list[str] | None = None
    include_stop_str_in_output: bool | None = None
    trace_decode_token_ids: list[U32] | None = None


class StreamOptions(msgspec.Struct):
    """`stream_options`; the second counts only together with the first."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Body(msgspec.Struct):
    """The whole body; unknown keys, `features` among them, are ignored."""

    token_ids: list[U32]
    sampling_params: SamplingParams
    request_id: str | None = None
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: I32 = 0
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    content_parts: list[Any] | None = None
    return_token_ids: bool | None = None
    output_mode: Literal["tokens", "text"] = "tokens"
