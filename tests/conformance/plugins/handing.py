"""Calls of a disaggregated fleet of two workers, and the blocks that its prefill worker keeps for hand-offs."""

import json
from collections.abc import Sequence
from typing import Any

import httpx

from core import Role
from tests.proxy import RunningProxy
from tests.workers import RunningWorker

PROMPT = list(range(100, 140))
PAIR: tuple[Role, ...] = ("prefill", "decode")
PATH = "/inference/v1/generate"


def body(*, prompt: Sequence[int] = PROMPT, stream: bool = False, **sampling: Any) -> dict[str, Any]:
    """A greedy call for four tokens, unless `sampling` says otherwise."""
    fixed = {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True}
    return {"token_ids": list(prompt), "sampling_params": fixed | sampling, "stream": stream}


def send(url: str, sent: dict[str, Any], headers: dict[str, str] | None = None) -> httpx.Response:
    """Send a call, to a worker or to headrace."""
    return httpx.post(f"{url}{PATH}", json=sent, headers=headers, timeout=60, trust_env=False)


def ask(url: str, sent: dict[str, Any]) -> tuple[httpx.Response, list[dict[str, Any]]]:
    """The response, and its replies: one, or the chunks of a stream."""
    response = send(url, sent)
    assert response.status_code == 200, response.text
    return response, replies(response)


def replies(response: httpx.Response) -> list[dict[str, Any]]:
    """The one reply, or the chunks of a stream."""
    if not response.headers["content-type"].startswith("text/event-stream"):
        return [response.json()]
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def tokens(replies: list[dict[str, Any]]) -> list[int]:
    """The tokens of the output."""
    return [token for reply in replies for choice in reply["choices"] for token in choice["token_ids"]]


def kept(worker: RunningWorker) -> bool:
    """Whether it keeps blocks for somebody."""
    return worker.metric("vllm:kv_cache_usage_perc") > 0


def in_flight(proxy: RunningProxy, worker: str) -> int:
    """How many calls are on one worker."""
    return next(entry["in_flight"] for entry in proxy.fleet() if entry["id"] == worker)


def legs(proxy: RunningProxy, name: str) -> list[dict[str, Any]]:
    """The parts of a call that have ended."""
    return [leg for leg in proxy.events("leg.settled") if leg["id"] == name]
