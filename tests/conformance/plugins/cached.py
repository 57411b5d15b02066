"""How much of a prompt came from a worker's prefix cache."""

import re

import httpx

from tests.proxy import RunningProxy, wait_for
from tests.workers import RunningWorker


def ask(proxy: RunningProxy, token_ids: list[int], sampling: dict[str, object] | None = None, **more: object) -> httpx.Response:
    """A generate call of two tokens; `headers` and `timeout` of `more` are the request's, the rest is the body's."""
    headers = more.pop("headers", None)
    body = {"token_ids": token_ids, "sampling_params": {"max_tokens": 2, "temperature": 0.0, **(sampling or {})}, **more}
    return httpx.post(f"{proxy.url}/inference/v1/generate", json=body, headers=headers, timeout=60)  # pyright: ignore[reportArgumentType]


def cached_tokens(worker: RunningWorker, proxy: RunningProxy, token_ids: list[int], sampling=None, **more) -> int:
    """Make the call, the only one on the worker, and tell how many tokens of its prompt the worker had."""
    return ask_counting(worker, proxy, token_ids, sampling, **more)[1]


def ask_counting(worker: RunningWorker, proxy: RunningProxy, token_ids: list[int], sampling=None, **more) -> tuple[httpx.Response, int]:
    """The same, with the reply.

    vLLM 0.31 doesn't tell it in its answers; then its counters do.
    """
    queried, hit = _counters(worker)
    reply = ask(proxy, token_ids, sampling, **more)
    assert reply.status_code == 200, reply.text
    if details := reply.json()["usage"]["prompt_tokens_details"]:
        return reply, details["cached_tokens"]
    # They follow the answer, together.
    wait_for(lambda: _counters(worker)[0] >= queried + len(token_ids))
    return reply, _counters(worker)[1] - hit


def _counters(worker: RunningWorker) -> tuple[int, int]:
    text = httpx.get(f"{worker.http}/metrics", timeout=10).text

    def total(name: str) -> int:
        return sum(int(float(value)) for value in re.findall(rf"^vllm:prefix_cache_{name}_total\S* (\S+)$", text, re.MULTILINE))

    return total("queries"), total("hits")
