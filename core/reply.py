"""What a client gets back: vLLM's generate reply, made whole, and the neutral form in which both wires hand their messages over."""

from typing import Any, Literal

from msgspec import Struct, field

FinishReason = Literal["stop", "length", "abort", "repetition", "error"]


class TopLogprob(Struct, gc=False):
    """A candidate for one position. `rank` is 1-based in the vocabulary, `None` when unknown."""

    token_id: int
    logprob: float
    rank: int | None = None


class TokenLogprob(Struct, gc=False):
    """The sampled token of one position and the candidates that were asked for (the sampled one first, then by rank).

    `token` is `token_id:<id>`, by which Prime-RL's clients know it.
    """

    token_id: int
    logprob: float
    rank: int | None = None
    token: str = ""
    top_logprobs: list[TopLogprob] = field(default_factory=list[TopLogprob])


class Logprobs(Struct):
    """One entry per output token."""

    content: list[TokenLogprob]


class PromptLogprob(Struct):
    """One token's logprob at a prompt position."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


#: Per prompt position: token id → logprob, the prompt's own token first. The first position has none.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class WeightVersion(Struct):
    """The policy version that produced output tokens `start` to `end` (exclusive)."""

    version: str
    start: int
    end: int


class PromptTokensDetails(Struct):
    """How much of the prompt came from the prefix cache."""

    cached_tokens: int


class Usage(Struct):
    """Token counts of a call; `n > 1` counts the prompt once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    #: `None` when the worker's wire doesn't tell.
    prompt_tokens_details: PromptTokensDetails | None = None


class Choice(Struct, kw_only=True):
    """One of the `n` outputs."""

    index: int
    token_ids: list[int]
    logprobs: Logprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    #: Base64 of a `.npy` file, as vLLM gives it, until a plugin makes something else of it.
    routed_experts: Any = None
    #: Per output token, the ids that were allowed.
    sampling_mask: list[list[int]] | None = None
    weight_versions: list[WeightVersion] | None = None


class ChunkChoice(Choice, kw_only=True, omit_defaults=True):
    """A choice in a stream: `token_ids` and `logprobs` are those of this chunk, and what is unset is left out."""


class GenerateReply(Struct, kw_only=True):
    """The whole reply of `/inference/v1/generate`."""

    request_id: str
    model: str
    created: int
    choices: list[Choice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    #: Base64 of a float32 `.npy` file of shape (scored positions, ids).
    prompt_token_id_logprobs: str | None = None
    prompt_token_ids: list[int] | None = None
    mm_placeholders: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    metrics: dict[str, Any] | None = None


class GenerateChunk(Struct, kw_only=True, omit_defaults=True):
    """One event of a stream."""

    request_id: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    mm_placeholders: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None


class Output(Struct, kw_only=True):
    """What a worker said in one message, whichever wire it came over. A unary answer is one `Output`.

    The token counts are `None` until the worker has told them; `completion_tokens` is cumulative.
    """

    choice: ChunkChoice
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_id_logprobs: str | None = None
    prompt_token_ids: list[int] | None = None
    mm_placeholders: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    metrics: dict[str, Any] | None = None
