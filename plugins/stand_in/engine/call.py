"""A call as the engine sees it, and what comes out of it, whichever wire it came over."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from plugins.stand_in.engine.adapters import Adapter


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen and when they stop. Defaults are vLLM's for gRPC; HTTP's temperature default is 1.0.

    The penalties, the reasoning budget and the structured output are checked, and then have no effect: there is no model.
    """

    temperature: float = 0.0
    top_k: int = 0  #: 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[Sequence[int]] = ()
    structured_output: tuple[str, Any] | None = None  #: its kind (`json`, `regex`, …) and its value
    thinking_token_budget: int | None = None
    max_tokens: int | None = None  #: None: all the room there is
    min_tokens: int = 0
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    stop_strings: Sequence[str] = ()
    include_stop_strings: bool = False
    logprobs: int | None = None  #: how many candidates beside the sampled token; -1: all; None: no logprobs
    logprob_token_ids: Sequence[int] | None = None  #: candidates chosen by id, in place of the best ones
    prompt_logprobs: int | None = None


class Medium(NamedTuple):
    """An image, a video or a sound of a prompt: what it is called, and which of the prompt's tokens stand for it."""

    identifier: str
    offset: int
    length: int


@dataclass(frozen=True, kw_only=True)
class Call:
    """One request to generate, parsed but not yet checked."""

    request_id: str
    prompt: Sequence[int]
    sampling: Sampling
    adapter: Adapter | None = None
    media: Sequence[Medium] = ()  #: by their offset
    data_parallel_rank: int | None = None  #: None: any
    salt: str | None = None
    bypass_prefix_cache: bool = False
    truncate_to: int = 0  #: keep the last N prompt tokens; 0: all
    text: bool = False  #: make text, and hold it back as stop strings demand
    skip_special_tokens: bool = True
    stream_interval: int = 1
    kv_transfer_params: Mapping[str, Any] | None = None


class Candidate(NamedTuple):
    """A token that could have stood at a position."""

    token: int
    logprob: float
    rank: int  #: from 1; for chosen ids the place in that choice


class Row(NamedTuple):
    """One token with its logprob, its rank in the vocabulary, and the candidates that were asked for."""

    token: int
    logprob: float
    rank: int
    candidates: Sequence[Candidate] = ()


@dataclass(frozen=True)
class Finish:
    """How a call ended.

    `reason` is `length`, `stop` or `abort`. With `stop`, exactly one of the three causes is set, if there is a token.
    """

    reason: str
    output_tokens: int
    cached_tokens: int
    stop_token_id: int | None = None
    eos_token_id: int | None = None
    stop_string: str | None = None
    kv_transfer_params: Mapping[str, Any] | None = None
    ec_transfer_params: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class PromptRead:
    """The first event of a call, just before the first token. `rows` starts at position 1; None when not asked for."""

    tokens: Sequence[int]
    rows: Sequence[Row] | None = None


@dataclass(frozen=True)
class Step:
    """New tokens of a call with the weight version that made each of them, and the end if this is it."""

    rows: Sequence[Row]
    versions: Sequence[str]
    text: str = ""
    finish: Finish | None = None


Event = PromptRead | Step
