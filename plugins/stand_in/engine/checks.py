"""The rules that a call has to keep, in the order in which vllm-rs 0.33.0 checks them (found by breaking two at a time)."""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from plugins.stand_in.engine.call import Call, Sampling
from plugins.stand_in.engine.refusal import invalid
from plugins.stand_in.options import Options

MAX_SALT_CHARACTERS = 128
MAX_LOGPROB_TOKEN_IDS = 128
MAX_BAD_WORDS = 128
MAX_BAD_WORD_TOKENS = 1024


@dataclass(frozen=True)
class Plan:
    """A call that may run: its prompt after truncation, and how many tokens it can make."""

    call: Call
    prompt: tuple[int, ...]
    max_tokens: int


def check(call: Call, options: Options) -> Plan:
    """Check everything about a call that doesn't need the engine. Refused: INVALID."""
    sampling = call.sampling
    if not call.prompt:
        raise invalid("the prompt must have at least one token")
    if "" in sampling.stop_strings:
        raise invalid("stop strings cannot be empty")
    _check_salt(call.salt)
    if call.truncate_to > options.max_model_len:
        raise invalid(f"truncate_prompt_tokens={call.truncate_to} is above max_model_len={options.max_model_len}")
    prompt = tuple(call.prompt[-call.truncate_to :])
    _check_vocabulary("prompt", prompt, options)
    _check_logprobs(sampling, options)
    _check_structured_output(sampling.structured_output)
    max_tokens = _room(prompt, sampling, options)
    _check_numbers(sampling)
    _check_vocabulary("stop_token_ids", sampling.stop_token_ids, options)
    _check_vocabulary("allowed_token_ids", sampling.allowed_token_ids or (), options)
    _check_vocabulary("logit_bias", sampling.logit_bias, options)
    _check_bad_words(sampling, options)
    _check_rank(call.data_parallel_rank, options)
    return Plan(call, prompt, max_tokens)


def check_json_schema(text: str) -> None:
    """A schema that is not JSON is refused before anything else about the call is looked at. Refused: INVALID."""
    try:
        json.loads(text)
    except ValueError as error:
        raise invalid(f"invalid json schema: {error}") from error


def _check_salt(salt: str | None) -> None:
    if salt is not None and not (0 < len(salt) <= MAX_SALT_CHARACTERS and not set(salt) & set("@/\\\0")):
        raise invalid(
            f"cache_salt must have 1 to {MAX_SALT_CHARACTERS} characters and none of '@', '/', '\\' and NUL",
        )


def _check_vocabulary(what: str, tokens: Iterable[int], options: Options) -> None:
    if outside := [token for token in tokens if not 0 <= token < options.vocab_size]:
        raise invalid(f"token_id(s) {outside} in {what} are out of vocabulary. Vocabulary size: {options.vocab_size}")


def _check_logprobs(sampling: Sampling, options: Options) -> None:
    if (ids := sampling.logprob_token_ids) is not None:
        if len(ids) > MAX_LOGPROB_TOKEN_IDS:
            raise invalid(f"{len(ids)} logprob_token_ids were asked for, the most is {MAX_LOGPROB_TOKEN_IDS}")
        if sampling.logprobs is not None and sampling.logprobs != len(ids):
            raise invalid(f"logprobs={sampling.logprobs} must equal the number of logprob_token_ids, {len(ids)}")
        _check_vocabulary("logprob_token_ids", ids, options)
    counts = {"logprobs": None if ids is not None else sampling.logprobs, "prompt_logprobs": sampling.prompt_logprobs}
    for what, count in counts.items():
        asked = options.vocab_size if count == -1 else count or 0
        if options.max_logprobs != -1 and asked > options.max_logprobs:
            raise invalid(f"requested {what} of {asked}, which is greater than max allowed: {options.max_logprobs}")
        if asked > options.vocab_size or asked < 0:
            raise invalid(f"requested {what} of {asked}, allowed are 0 to {options.vocab_size}, or -1 for all")


def _check_structured_output(structured: tuple[str, Any] | None) -> None:
    if structured is None:
        return
    kind, value = structured
    if kind in {"grammar", "structural_tag", "choice"} and not value:
        raise invalid(f"structured_outputs.{kind} cannot be empty")
    if kind == "regex" and "\0" in value:
        raise invalid("structured_outputs.regex must not contain NUL")


def _room(prompt: tuple[int, ...], sampling: Sampling, options: Options) -> int:
    room = options.max_model_len - len(prompt)
    if room <= 0:
        raise invalid(
            f"This model's maximum context length is {options.max_model_len} tokens; the prompt of {len(prompt)} leaves no room for output",
            param="input_tokens",
        )
    max_tokens = room if sampling.max_tokens is None else min(room, sampling.max_tokens)
    if sampling.min_tokens > max_tokens:
        raise invalid(f"min_tokens={sampling.min_tokens} must not be above max_tokens={max_tokens}")
    if (budget := sampling.thinking_token_budget) is not None and budget < -1:
        raise invalid(f"thinking_token_budget must be 0 or more, or -1 for unlimited, got {budget}")
    return max_tokens


def _check_numbers(sampling: Sampling) -> None:
    for name, value, fits, allowed in _ranges(sampling):
        if not math.isfinite(value):
            raise invalid(f"{name} must be a finite number, got {value}")
        if not fits:
            raise invalid(f"{name} must be in {allowed}, got {value:g}")


def _ranges(sampling: Sampling) -> Iterator[tuple[str, float, bool, str]]:
    yield "temperature", sampling.temperature, 0 <= sampling.temperature <= 2, "[0, 2]"
    yield "top_p", sampling.top_p, 0 < sampling.top_p <= 1, "(0, 1]"
    yield "min_p", sampling.min_p, 0 <= sampling.min_p <= 1, "[0, 1]"
    yield "frequency_penalty", sampling.frequency_penalty, -2 <= sampling.frequency_penalty <= 2, "[-2, 2]"
    yield "presence_penalty", sampling.presence_penalty, -2 <= sampling.presence_penalty <= 2, "[-2, 2]"
    yield "repetition_penalty", sampling.repetition_penalty, sampling.repetition_penalty > 0, "(0, inf)"


def _check_bad_words(sampling: Sampling, options: Options) -> None:
    if not all(sampling.bad_words):
        raise invalid("bad_words_token_ids must not contain empty sequences")
    if len(sampling.bad_words) > MAX_BAD_WORDS:
        raise invalid(f"{len(sampling.bad_words)} bad words, the most is {MAX_BAD_WORDS}")
    total = sum(map(len, sampling.bad_words))
    if total > MAX_BAD_WORD_TOKENS:
        raise invalid(f"{total} tokens in bad words, the most is {MAX_BAD_WORD_TOKENS}")
    for word in sampling.bad_words:
        _check_vocabulary("bad_words", word, options)


def _check_rank(rank: int | None, options: Options) -> None:
    connected = list(range(options.data_parallel_size))
    if rank is not None and rank not in connected:
        raise invalid(f"data parallel rank {rank} is not connected to this worker; connected ranks: {connected}")
