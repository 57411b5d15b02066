"""From the engine's events to the JSON of `/inference/v1/generate`, whole or in chunks."""

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from plugins.stand_in.engine.call import Candidate, Finish, PromptRead, Row, Step
from plugins.stand_in.over_http.body import Body

#: What JSON has in place of minus infinity and NaN (vLLM).
_WORST = -9999.0

JsonObject = dict[str, Any]


class Reply:
    """Collects the events of one call."""

    def __init__(self, body: Body, request_id: str) -> None:
        self._body = body
        self._request_id = request_id
        self._prompt: PromptRead | None = None
        self._rows: list[Row] = []
        self._versions: list[str] = []
        self._finish: Finish | None = None

    def add(self, event: PromptRead | Step) -> None:
        """Take in an event."""
        if isinstance(event, PromptRead):
            self._prompt = event
            return
        self._rows.extend(event.rows)
        self._versions.extend(event.versions)
        self._finish = event.finish or self._finish

    def whole(self) -> JsonObject:
        """The reply to a call that was not streamed: every key, null where there is nothing."""
        assert self._prompt is not None
        assert self._finish is not None
        kv_transfer_params = self._finish.kv_transfer_params
        return {
            "request_id": self._request_id,
            "choices": [
                {
                    "index": 0,
                    "logprobs": self._logprobs(self._rows),
                    "finish_reason": self._finish.reason,
                    "stop_reason": self._finish.stop_token_id,
                    "token_ids": [row.token for row in self._rows],
                    "routed_experts": None,
                    "sampling_mask": None,
                    "weight_versions": spans(self._versions),
                }
            ],
            "prompt_logprobs": _prompt_logprobs(self._prompt),
            "prompt_token_id_logprobs": None,
            "prompt_token_ids": list(self._prompt.tokens) if self._body.return_token_ids else None,
            "mm_placeholders": None,
            "kv_transfer_params": None if kv_transfer_params is None else dict(kv_transfer_params),
            "ec_transfer_params": None,
            "metrics": None,
        }

    def chunk(self, step: Step) -> JsonObject:
        """A chunk for the step that was added last: only keys that have something."""
        choice: JsonObject = {"index": 0}
        if (logprobs := self._logprobs(step.rows)) is not None:
            choice["logprobs"] = logprobs
        if step.finish is not None:
            choice["finish_reason"] = step.finish.reason
            if step.finish.stop_token_id is not None:
                choice["stop_reason"] = step.finish.stop_token_id
        choice["token_ids"] = [row.token for row in step.rows]
        if step.finish is not None:
            choice["weight_versions"] = spans(self._versions)
        chunk: JsonObject = {"request_id": self._request_id, "choices": [choice]}
        options = self._body.stream_options
        if options is not None and options.include_usage and options.continuous_usage_stats:
            chunk["usage"] = self._usage()
        if self._body.return_token_ids and self._prompt is not None and len(self._rows) == len(step.rows):
            chunk["prompt_token_ids"] = list(self._prompt.tokens)
        return chunk

    def closing(self) -> JsonObject | None:
        """The chunk after the last, if usage was asked for."""
        options = self._body.stream_options
        if options is None or not options.include_usage:
            return None
        return {"request_id": self._request_id, "choices": [], "usage": self._usage()}

    def _usage(self) -> JsonObject:
        prompt, completion = len(self._prompt.tokens if self._prompt else ()), len(self._rows)
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + completion,
            "completion_tokens": completion,
            "prompt_tokens_details": None,
            "completion_tokens_details": {"reasoning_tokens": 0},
        }

    def _logprobs(self, rows: Sequence[Row]) -> JsonObject | None:
        if self._body.sampling_params.logprobs is None or not rows:
            return None
        return {"content": [_entry(row) for row in rows]}


def spans(versions: Sequence[str]) -> list[JsonObject]:
    """Weight versions of successive tokens, as contiguous spans of output positions."""
    found: list[JsonObject] = []
    start = 0
    for version, run in groupby(versions):
        end = start + sum(1 for _ in run)
        found.append({"version": version, "start": start, "end": end})
        start = end
    return found


def _entry(row: Row) -> JsonObject:
    # The engine's order: the sampled token first, then the candidates without it.
    others = [candidate for candidate in row.candidates if candidate.token != row.token]
    top = [_scored(row.token, row.logprob, row.rank), *(_scored(*candidate) for candidate in others)]
    return {**_scored(row.token, row.logprob, row.rank), "top_logprobs": top}


def _scored(token: int, logprob: float, rank: int) -> JsonObject:
    return {"token_id": token, "logprob": _finite(logprob), "rank": rank or None}


def _prompt_logprobs(prompt: PromptRead) -> list[Mapping[str, Any] | None] | None:
    if prompt.rows is None:
        return None
    return [None, *(_position(row) for row in prompt.rows)]


def _position(row: Row) -> Mapping[str, Any]:
    scored = [Candidate(row.token, row.logprob, row.rank), *row.candidates]
    return {
        str(token): {"logprob": _finite(logprob), "rank": rank, "decoded_token": f"token_id:{token}"} for token, logprob, rank in scored
    }


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _WORST
