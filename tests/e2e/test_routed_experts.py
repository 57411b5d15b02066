"""Routed experts of a real mixture of experts: the rows through headrace are the rows asked directly."""

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from tests.proxy import RunningProxy, headrace
from tests.workers import RunningWorker

pytestmark = pytest.mark.real

PROMPT = list(b"The experts of a token are known before it is.")
LENGTH = 6
#: Two layers, two experts for each token, a byte each.
ROW = 4


@pytest.fixture(scope="module")
def worker(routing_worker: RunningWorker) -> RunningWorker:
    return routing_worker


@pytest.fixture(scope="module")
def proxy(worker: RunningWorker) -> Iterator[RunningProxy]:
    with headrace(worker) as proxy:
        yield proxy


def ask(url: str, token_ids: list[int], start: int | None = None, **members: Any) -> httpx.Response:
    sampling = {"max_tokens": LENGTH, "temperature": 0.0, "ignore_eos": True, "routed_experts_prompt_start": start}
    wanted = {name: value for name, value in sampling.items() if value is not None}
    return httpx.post(f"{url}/inference/v1/generate", json={"token_ids": token_ids, "sampling_params": wanted, **members}, timeout=60)


def directly(worker: RunningWorker, token_ids: list[int], start: int | None = None) -> tuple[list[int], bytes]:
    """The output and its rows, out of vLLM's own file."""
    choice = ask(worker.http, token_ids, start).raise_for_status().json()["choices"][0]
    file = base64.b64decode(choice["routed_experts"])
    return choice["token_ids"], file[10 + int.from_bytes(file[8:10], "little") :]


def through(proxy: RunningProxy, token_ids: list[int], start: int | None = None) -> tuple[list[int], bytes]:
    choice = ask(proxy.url, token_ids, start, return_routed_experts=True).raise_for_status().json()["choices"][0]
    routed = choice["routed_experts"]
    data = base64.b64decode(routed["data"])
    assert list(routed) == ["data", "shape", "start", "dtype"]
    assert (routed["start"], routed["dtype"], routed["shape"]) == (start or 0, "uint8", [len(data) // ROW, 2, 2])
    return choice["token_ids"], data


@pytest.mark.parametrize("start", [None, 0, 10, len(PROMPT)])
def test_the_rows_are_those_asked_directly(worker, proxy, start):
    output, rows = through(proxy, PROMPT, start)
    assert (output, rows) == directly(worker, PROMPT, start)
    assert len(rows) == (len(PROMPT) + LENGTH - 1 - (start or 0)) * ROW
    assert len(set(rows)) > 2


def test_the_rows_of_two_turns_merge_to_those_of_the_conversation(worker, proxy):
    output, first = through(proxy, PROMPT)
    conversation = [*PROMPT, *output, *b" And then?"]
    _, second = through(proxy, conversation, len(PROMPT) + LENGTH - 1)
    assert first + second == directly(worker, conversation)[1]


def test_a_stream_ends_with_the_rows_of_a_whole_reply(proxy):
    lines = ask(proxy.url, PROMPT, stream=True, return_routed_experts=True).text.splitlines()
    last = msgspec.json.decode(next(line for line in reversed(lines) if line.startswith("data: {")).removeprefix("data: "))
    assert base64.b64decode(last["choices"][0]["routed_experts"]["data"]) == through(proxy, PROMPT)[1]


def test_a_call_that_does_not_ask_goes_over_grpc_and_has_none(proxy):
    reply = ask(proxy.url, PROMPT)
    assert reply.json()["choices"][0]["routed_experts"] is None
    assert proxy.settled(reply.headers["x-request-id"])["wire"] == "grpc"
