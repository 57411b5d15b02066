"""Routed experts through a real headrace: rows from a server that captures, an error from one that doesn't."""

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from tests import workers
from tests.proxy import RunningProxy, headrace
from tests.workers import RunningWorker
from tests.workers.scripted_engine.behaviour import routed_experts

PROMPT = [72, 105, 33]
#: Of the output, in tokens; the last one has no row.
LENGTH = 3


@pytest.fixture(scope="module")
def capturing() -> Iterator[RunningProxy]:
    if reason := workers.why_not("scripted"):
        pytest.skip(f"no scripted worker here: {reason}")
    with workers.scripted(routed_experts=True) as worker, headrace(worker) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def plain(worker: RunningWorker) -> Iterator[RunningProxy]:
    with headrace(worker) as proxy:
        yield proxy


def ask(proxy: RunningProxy, start: int | None = None, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
    sampling = {"max_tokens": LENGTH, "temperature": 0.0, "ignore_eos": True, "routed_experts_prompt_start": start}
    body = {"token_ids": PROMPT, "sampling_params": sampling, "return_routed_experts": True} | body
    return httpx.post(f"{proxy.url}/inference/v1/generate", json=body, headers=headers, timeout=30)


def rows(start: int, token_ids: list[int] = PROMPT, length: int = LENGTH) -> dict[str, Any]:
    data = bytes(routed_experts(start, len(token_ids) + length - 1 - start))
    return {"data": base64.b64encode(data).decode(), "shape": [len(data) // 4, 2, 2], "start": start, "dtype": "uint8"}


@pytest.mark.real
@pytest.mark.parametrize("start", [None, 0, 2, 3])
def test_the_rows_of_a_reply_are_those_that_the_engine_reported(capturing, start):
    assert ask(capturing, start).json()["choices"][0]["routed_experts"] == rows(start or 0)


@pytest.mark.real
def test_the_rows_of_a_stream_come_in_its_last_chunk(capturing):
    events = [line.removeprefix("data: ") for line in ask(capturing, stream=True).text.splitlines() if line.startswith("data: {")]
    found = [msgspec.json.decode(event)["choices"][0].get("routed_experts") for event in events]
    assert (found[:-1], found[-1]) == ([None] * (len(found) - 1), rows(0))


@pytest.mark.real
def test_the_rows_of_two_turns_merge_to_those_of_the_conversation(capturing):
    first = ask(capturing).json()["choices"][0]
    conversation = [*PROMPT, *first["token_ids"], 44, 45]
    known = len(PROMPT) + LENGTH - 1
    second = ask(capturing, known, token_ids=conversation).json()["choices"][0]
    merged = b"".join(base64.b64decode(turn["routed_experts"]["data"]) for turn in (first, second))
    assert merged == bytes(routed_experts(0, len(conversation) + LENGTH - 1))


@pytest.mark.real
def test_the_file_itself_can_be_had(capturing):
    file = base64.b64decode(ask(capturing, headers={"x-headrace-routed-experts": "npy"}).json()["choices"][0]["routed_experts"])
    assert (file[:8], file[128:]) == (b"\x93NUMPY\x01\x00", bytes(routed_experts(0, 5)))


@pytest.mark.real
def test_a_start_beyond_the_prompt_is_refused_by_the_worker(capturing):
    assert ask(capturing, 9).status_code == 400


def test_a_worker_that_does_not_capture_is_named_as_such(plain):
    reply = ask(plain)
    assert (reply.status_code, "--enable-return-routed-experts" in reply.text) == (502, True)


def test_a_call_that_does_not_ask_is_answered(plain):
    assert ask(plain, return_routed_experts=False).json()["choices"][0]["routed_experts"] is None
