"""Bodies of tens of megabytes, both ways."""

import httpx
import msgspec
import pytest

from tests import workers
from tests.faults.clients import PATH, body, tokens_of
from tests.proxy import headrace

MIB = 2**20


class _Candidates(msgspec.Struct):
    top_logprobs: list[msgspec.Raw]


class _Content(msgspec.Struct):
    content: list[_Candidates]


class _Choice(msgspec.Struct):
    token_ids: list[int]
    logprobs: _Content


class _Reply(msgspec.Struct):
    choices: list[_Choice]


@pytest.mark.parametrize("wire", ["grpc", "http"])
def test_a_request_of_32_mib_is_answered(wire):
    with workers.scripted(max_model_len=8_000_000, vocab_size=100_000, fast=True) as worker, headrace(worker, wires=wire) as proxy:
        # A little less over HTTP: vLLM's own limit is 32 MiB, and headrace's body has more than the tokens in it.
        tokens = [65_000 + number % 30_000 for number in range((32 * MIB if wire == "grpc" else 32 * MIB - 1000) // 6)]
        sent = msgspec.json.encode(body(tokens, 3))
        assert len(sent) >= 31.9 * MIB
        response = httpx.post(f"{proxy.url}{PATH}", content=sent, timeout=120, trust_env=False)
        assert response.status_code == 200, response.text
        assert response.json()["usage"]["prompt_tokens"] == len(tokens)
        assert len(tokens_of(response)) == 3


@pytest.fixture(scope="module")
def talkative():
    """A worker that tells all 320 candidates of each token, and makes 64 tokens at a time."""
    with workers.scripted(max_model_len=8192, tokens_per_step=64, fast=True, server_arguments=["--max-logprobs", "-1"]) as worker:
        yield worker


@pytest.mark.parametrize("wire", ["grpc", "http"])
def test_a_reply_of_64_mib_is_whole(talkative, wire):
    with headrace(talkative, wires=wire) as proxy:
        response = httpx.post(f"{proxy.url}{PATH}", json=body(b"Hello", 4400, logprobs=-1), timeout=120, trust_env=False)
    assert response.status_code == 200
    assert len(response.content) >= 64 * MIB
    (choice,) = msgspec.json.decode(response.content, type=_Reply).choices
    assert len(choice.token_ids) == 4400
    assert {len(entry.top_logprobs) for entry in choice.logprobs.content} == {320}


@pytest.mark.parametrize("wire", ["grpc", "http"])
def test_a_stream_of_64_mib_is_whole(talkative, wire):
    with headrace(talkative, wires=wire) as proxy:
        response = httpx.post(f"{proxy.url}{PATH}", json=body(b"Hello", 4400, logprobs=-1, stream=True), timeout=120, trust_env=False)
    assert len(response.content) >= 64 * MIB
    assert len(tokens_of(response)) == 4400
