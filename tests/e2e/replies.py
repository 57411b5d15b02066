"""Replies of the generate route, reduced to what has to be the same whoever answered: tokens and numbers, in single precision."""

import json
import struct
from collections.abc import Iterable
from typing import Any, NamedTuple

import httpx

PATH = "/inference/v1/generate"


class Said(NamedTuple):
    """What a reply says: tokens, their log-probabilities as the bytes of a float, their ranks, candidates beside them, and the end."""

    tokens: list[int]
    logprobs: list[bytes]
    ranks: list[int | None]
    candidates: list[dict[int, tuple[bytes, int | None]]]
    finish_reason: str
    stop_reason: int | str | None
    prompt: list[dict[int, tuple[bytes, int | None]]]

    def as_told_by(self, other: "Said") -> "Said":
        """The same, without the ranks of the output and the stop reason when the other reply has no ranks: vLLM 0.31's HTTP server tells
        neither.
        """
        if any(other.ranks):
            return self
        bare = [{token: (logprob, None) for token, (logprob, _) in each.items()} for each in self.candidates]
        return self._replace(ranks=[None] * len(self.ranks), candidates=bare, stop_reason=None)


def body(prompt: Iterable[int], tokens: int, *, stream: bool = False, **sampling: Any) -> dict[str, Any]:
    """A call for exactly so many tokens with two candidates each.

    It doesn't read the prefix cache: a real engine's numbers differ in their last bits when part of the prompt comes from there.
    """
    fixed = {"max_tokens": tokens, "ignore_eos": True, "logprobs": 2, "skip_reading_prefix_cache": True}
    return {"token_ids": list(prompt), "sampling_params": fixed | sampling, "stream": stream}


def ask(url: str, sent: dict[str, Any]) -> Said:
    """Send a call, streamed or not, to a worker or to headrace."""
    response = httpx.post(f"{url}{PATH}", json=sent, timeout=300, trust_env=False)
    assert response.status_code == 200, response.text
    if not sent["stream"]:
        return said(response.json())
    *blocks, done, end = response.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return joined(json.loads(block.removeprefix("data: ")) for block in blocks if not block.startswith(":"))


def said(reply: dict[str, Any]) -> Said:
    """What a whole reply, or one chunk of a stream, says."""
    (choice,) = reply["choices"]
    entries = choice["logprobs"]["content"]
    return Said(
        tokens=choice["token_ids"],
        logprobs=[_single(entry["logprob"]) for entry in entries],
        ranks=[entry.get("rank") for entry in entries],
        candidates=[{_id(candidate): _ranked(candidate) for candidate in entry["top_logprobs"]} for entry in entries],
        finish_reason=choice.get("finish_reason") or "",
        stop_reason=choice.get("stop_reason"),
        prompt=[{int(token): _ranked(value) for token, value in (entry or {}).items()} for entry in reply.get("prompt_logprobs") or ()],
    )


def joined(chunks: Iterable[dict[str, Any]]) -> Said:
    """What the chunks of a stream say together."""
    parts = [said(chunk) for chunk in chunks]
    return Said(
        tokens=[token for part in parts for token in part.tokens],
        logprobs=[logprob for part in parts for logprob in part.logprobs],
        ranks=[rank for part in parts for rank in part.ranks],
        candidates=[candidates for part in parts for candidates in part.candidates],
        finish_reason="".join(part.finish_reason for part in parts),
        stop_reason=next((part.stop_reason for part in parts if part.stop_reason is not None), None),
        prompt=[position for part in parts for position in part.prompt],
    )


def _id(candidate: dict[str, Any]) -> int:
    """vLLM 0.31 names tokens, later ones number them."""
    return candidate["token_id"] if "token_id" in candidate else int(candidate["token"].removeprefix("token_id:"))


def _ranked(candidate: dict[str, Any]) -> tuple[bytes, int | None]:
    return _single(candidate["logprob"]), candidate.get("rank")


def _single(value: float) -> bytes:
    return struct.pack("<f", value)
