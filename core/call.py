"""One generate request on its way through headrace."""

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, field

from core.settings import Role

if TYPE_CHECKING:
    from core.fleet.worker import Worker

TokenId = Annotated[int, Meta(ge=0, lt=2**32)]
UInt32 = Annotated[int, Meta(ge=0, lt=2**32)]
#: A number of candidates per token; −1 is the whole vocabulary.
Candidates = Annotated[int, Meta(ge=-1, lt=2**32)]


class StructuredOutputs(Struct, omit_defaults=True, forbid_unknown_fields=True):
    """What the output has to look like; exactly one of the first six (vLLM 0.33: refuses two)."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None


class SamplingParams(Struct, omit_defaults=True):
    """`sampling_params` of vLLM 0.33's generate route: every key that one of its servers knows.

    `None` means that the client did not say. Ranges are the worker's to check; here stand only the types, and the bounds of what a
    wire can carry at all.
    """

    n: Annotated[int, Meta(ge=1, le=4096)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=2**32)] | None = None
    min_p: float | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    max_tokens: Annotated[int, Meta(ge=1, lt=2**32)] | None = None
    min_tokens: UInt32 | None = None
    ignore_eos: bool | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    thinking_token_budget: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    repetition_detection: dict[str, Any] | None = None
    logit_bias: dict[TokenId, float] | None = None
    allowed_token_ids: list[TokenId] | None = None
    bad_words: list[str] | None = None
    bad_words_token_ids: list[list[TokenId]] | None = None
    structured_outputs: StructuredOutputs | None = None
    logprobs: Candidates | None = None
    prompt_logprobs: Candidates | None = None
    logprob_token_ids: list[TokenId] | None = None
    prompt_logprob_token_ids: list[list[TokenId]] | None = None
    prompt_logprob_start: int | None = None
    skip_reading_prefix_cache: bool | None = None
    routed_experts_prompt_start: UInt32 | None = None
    trace_decode_token_ids: list[TokenId] | None = None
    stream_interval: UInt32 | None = None
    watermarking: bool | None = None
    vllm_xargs: dict[str, Any] | None = None
    extra_args: dict[str, Any] | None = None
    # These shape text, and this route answers in tokens.
    detokenize: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether the reply carries logprobs of the output."""
        return self.logprobs is not None or self.logprob_token_ids is not None


#: Top-level keys of the body that the core knows.
BODY_KEYS = (
    "cache_salt",
    "ec_transfer_params",
    "kv_transfer_params",
    "model",
    "output_mode",
    "priority",
    "reasoning_ended",
    "reasoning_parser_kwargs",
    "request_id",
    "return_token_ids",
    "sampling_params",
    "session_id",
    "session_params",
    "stream",
    "stream_options",
    "token_ids",
    "user",
    "user_id",
)


class StreamOptions(Struct, forbid_unknown_fields=True):
    """When a stream carries `usage`: in one more chunk at the end, or in every chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class ReasoningParserKwargs(Struct, omit_defaults=True, forbid_unknown_fields=True):
    """What the reasoning parser is told about the chat template."""

    chat_template_kwargs: dict[str, Any] | None = None


class Identity(Struct, frozen=True):
    """What makes two calls share KV blocks: calls with different identities never do.

    `namespace` is the salt: what stands here is what the engine gets. `adapter` is the LoRA adapter's name, `media` one content-bound
    identifier per item, in the order of the prompt. `media_ranges` are their places in `token_ids`, each an offset and a length; empty when
    only the worker will know. `per_worker` gives what comes behind the namespace on a worker, for a salt that depends on where the call
    goes. With `media_by_salt` what an engine made of a medium isn't shared between salts either, see `media_under`.
    """

    namespace: str = ""
    adapter: str = ""
    media: tuple[str, ...] = ()
    media_ranges: tuple[tuple[int, int], ...] = ()
    per_worker: "Callable[[Worker], str] | None" = None
    media_by_salt: bool = False

    def namespace_on(self, worker: "Worker") -> str:
        """The salt of the call on this worker. Raises: the `CallError` with which `per_worker` refuses it."""
        return self.namespace if self.per_worker is None else self.namespace + self.per_worker(worker)

    def media_under(self, salt: str) -> tuple[str, ...]:
        """The identifiers of the media in an engine that gets this salt."""
        return tuple(f"{salt}/{medium}" for medium in self.media) if self.media_by_salt else self.media


class Call(Struct, kw_only=True):
    """A generate call. Plugins edit it in `receive_call`, `prepare_call` and `identify_call`; later hooks only read it.

    `unclaimed` and `unclaimed_sampling` hold the keys of the body and of its `sampling_params` that the core does not know. A plugin
    that honours one pops it; what is left after `prepare_call` is refused with a 400, because nothing is silently dropped.
    """

    id: str
    token_ids: list[int]
    sampling: SamplingParams
    #: The model's name as the client wrote it; empty when it did not say. A plugin may put another one here; then `reply_model` is what
    #: the reply names.
    model: str = ""
    reply_model: str = ""
    stream: bool = False
    stream_options: StreamOptions = field(default_factory=StreamOptions)
    #: Keeps KV caches apart; empty for none. vLLM 0.33: at most 128 characters, none of `@ / \\ NUL`. The engine gets the namespace of the
    #: `identity`, which this becomes.
    cache_salt: str = ""
    #: Lower is more urgent.
    priority: int = 0
    #: What the client calls the session: `X-Session-ID`, else the body's `session_params.session_id` or `session_id`.
    session_id: str = ""
    #: What the body says of whose call it is, under the field's name: `session_params.session_id`, `user`, `session_id`, `user_id`, in this
    #: order, as far as they are there. For policies; a worker is told `session_id` alone.
    owner: dict[str, str] = field(default_factory=dict[str, str])
    adapter: str = ""
    #: The role of the workers that the call may go to. `None`: workers that answer whole calls, `aggregated` and `decode`.
    role: Role | None = None
    #: Parts of the call that other workers have done before (`begin_attempt`), in words; `x-headrace-route` shows them first.
    legs: tuple[str, ...] = ()
    #: How long, in seconds, the call stays on its worker until its first output though its client has gone; `None`: it doesn't. What is
    #: held goes to the worker as a stream (`stream`), whatever the client gets, because only a stream shows a first output. A shutdown
    #: doesn't wait for it.
    hold: float | None = None
    #: How many further workers are tried after any failure (5xx) before the first output. `None`: `[routing] retries`, after a lost worker.
    retries: int | None = None
    data_parallel_rank: int | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    return_token_ids: bool = False
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: ReasoningParserKwargs | None = None
    #: The body goes to a worker's HTTP server as it is (`Proxy.relay`): `token_ids` is empty and `sampling` says nothing, and what stays
    #: in `unclaimed` is the worker's to judge.
    relayed: bool = False
    #: Whether KV blocks may come of it, or be used: not so where text only becomes tokens, say, and a salt says nothing.
    touches_kv: bool = True
    #: Request headers, names in lower case.
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    unclaimed: dict[str, msgspec.Raw] = field(default_factory=dict[str, msgspec.Raw])
    unclaimed_sampling: dict[str, Any] = field(default_factory=dict[str, Any])
    identity: Identity = Identity()
    #: Names of what the call needs from a wire beyond the plain fields; see `core.wire.needs`.
    needs: set[str] = field(default_factory=set[str])
    #: Of a need that isn't a field's path, the fields of the client, and the settings (`plugins.…`), that it comes from (`need`).
    needed_by: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    #: What a plugin keeps for its own later hooks, under the plugin's name.
    notes: dict[str, Any] = field(default_factory=dict[str, Any])
    #: Response headers that plugins add.
    reply_headers: dict[str, str] = field(default_factory=dict[str, str])
    #: Unix time of arrival, in seconds, and the monotonic clock's reading of the same moment.
    created: float = field(default_factory=time.time)
    started: float = field(default_factory=time.perf_counter)

    @property
    def part(self) -> Role | None:
        """Which part of a call this is: `prefill` or `encode`; `None` for all of it, and for the decode after a prefill.

        These two may go to the same workers, whose caches hold what both leave: what is remembered of one holds for the other.
        """
        return None if self.role in ("aggregated", "decode") else self.role

    def need(self, need: str, by: str) -> None:
        """Add to `needs`. `by` is the client's field, or the setting, that it comes from: a refusal names that."""
        self.needs.add(need)
        self.needed_by[need] = (*self.needed_by.get(need, ()), by)


def id_of_output(call_id: str, index: int) -> str:
    """The id by which a worker knows one of several outputs."""
    return f"{call_id}-{index}"


class Outcome(Struct, kw_only=True):
    """How a call ended: what `call_settled` is told.

    `ok` finished (also by an abort on the worker), `refused` with a 4xx, `failed` with a 5xx, `client-gone`, `cancelled` by headrace
    itself (shutdown).
    """

    kind: Literal["ok", "refused", "failed", "client-gone", "cancelled"]
    status: int
    error: str = ""
    worker: str = ""
    wire: str = ""
    #: Why this worker was chosen.
    route: str = ""
    #: How many workers were tried.
    attempts: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    #: `None` when the worker's wire doesn't tell.
    cached_tokens: int | None = None
    #: From arrival to the first output, and to the end; `None` when there was no output.
    first_output_seconds: float | None = None
    seconds: float = 0.0
