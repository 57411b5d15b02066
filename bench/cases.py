"""The requests that are measured, and how a reply proves that it is complete."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import msgspec

_T = TypeVar("_T")

Dialect = Literal["generate", "completions"]
Engine = Literal["fast", "paced"]

MODEL = "tiny"
GENERATE = "/inference/v1/generate"
#: The paced engine's time between two tokens of one request: long enough that each is a message, and a write, of its own.
PACE_SECONDS = 0.005

_PROMPTS = 8
_FIRST_ID, _LAST_ID = 32, 250  # lower ids are orders to the scripted engine


class WrongReply(Exception):
    """A reply that isn't what was asked for; the text says how."""


@dataclass(frozen=True)
class Case:
    """One kind of request. Lengths in tokens."""

    name: str
    prompt: int
    output: int
    #: requests at once, each on a connection of its own
    concurrency: int
    #: requests in one round
    requests: int
    logprobs: int | None = None
    stream: bool = False
    engine: Engine = "fast"

    def bodies(self, dialect: Dialect) -> list[bytes]:
        """Some requests to send in turn; the same for every target of one dialect."""
        draw = random.Random(self.prompt)
        prompts = [[draw.randint(_FIRST_ID, _LAST_ID) for _ in range(self.prompt)] for _ in range(_PROMPTS)]
        return [msgspec.json.encode(self._body(prompt, dialect)) for prompt in prompts]

    def check(self, reply: bytes, dialect: Dialect) -> None:
        """Raises: `WrongReply` unless the reply has every token, and a log-probability for each if they were asked for."""
        if self.stream:
            count = _streamed_tokens(reply) if dialect == "generate" else _streamed_usage(reply)
        else:
            choice = _decode(reply, _Reply).choices[0]
            count = len(choice.token_ids)
            scored = len(choice.logprobs.content) if choice.logprobs else 0
            if self.logprobs is not None and scored != self.output:
                raise WrongReply(f"{scored} log-probabilities instead of {self.output}")
        if count != self.output:
            raise WrongReply(f"{count} tokens instead of {self.output}")

    def _body(self, prompt: list[int], dialect: Dialect) -> Mapping[str, Any]:
        sampling: dict[str, Any] = {"max_tokens": self.output, "temperature": 1.0, "ignore_eos": True}
        if self.logprobs is not None:
            sampling["logprobs"] = self.logprobs
        if dialect == "completions":
            return {"model": MODEL, "prompt": prompt, "stream": True, "stream_options": {"include_usage": True}, **sampling}
        return {"model": MODEL, "token_ids": prompt, "stream": self.stream, "sampling_params": sampling}


def cases(*, quick: bool = False) -> list[Case]:
    """All cases; the quick ones have a tenth of the requests, and not the many streams."""

    def count(requests: int, concurrency: int) -> int:
        return max(concurrency, requests // 10) if quick else requests

    unary = [
        Case(f"{prompt:,} → {output:,}", prompt, output, concurrency, count(requests, concurrency), logprobs)
        for prompt, output, concurrency, requests in ((200, 16, 8, 800), (8_000, 1_000, 4, 60), (30_000, 8_000, 2, 12))
        for logprobs in (1, None)
    ]
    streams = [
        Case("streamed 200 → 500, several tokens waiting", 200, 500, 4, count(32, 4), stream=True),
        Case("streamed 200 → 500, one token at a time", 200, 500, 4, count(8, 4), stream=True, engine="paced"),
    ]
    many = Case("streamed 200 → 500, one token at a time", 200, 500, 64, 64, stream=True, engine="paced")
    return [*unary, *streams] if quick else [*unary, *streams, many]


@dataclass
class _Logprobs:
    content: list[msgspec.Raw] = field(default_factory=list)


@dataclass
class _Choice:
    token_ids: list[int] = field(default_factory=list)
    logprobs: _Logprobs | None = None


@dataclass
class _Usage:
    completion_tokens: int


@dataclass
class _Reply:
    choices: list[_Choice]
    usage: _Usage | None = None


@dataclass
class _TextChunk:
    usage: _Usage | None = None


def _streamed_tokens(reply: bytes) -> int:
    return sum(len(choice.token_ids) for event in _events(reply) for choice in _decode(event, _Reply).choices)


def _streamed_usage(reply: bytes) -> int:
    """A stream of text doesn't show its tokens, but its last event counts them."""
    usages = [usage.completion_tokens for event in _events(reply) if (usage := _decode(event, _TextChunk).usage)]
    return usages[-1] if usages else 0


def _events(reply: bytes) -> list[bytes]:
    events = [part[6:] for part in reply.split(b"\n\n") if part.startswith(b"data: ")]
    if not events or events.pop() != b"[DONE]":
        raise WrongReply("the stream ends without [DONE]")
    return events


def _decode(data: bytes, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise WrongReply(f"{error}: {data[:200]!r}") from error
