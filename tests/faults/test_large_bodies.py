"""Bodies of tens of megabytes, both ways; and those that are too large, or never come."""

import httpx
import msgspec
import pytest

from tests import workers
from tests.faults.clients import PATH, body, read_until, tokens_of
from tests.proxy import HOSTS, headrace

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


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("path", [PATH, "/pause"])
def test_a_body_that_never_comes_is_a_408(host, path):
    settings = "[server]\nbody_timeout = 0.5\n"
    with workers.stand_in() as worker, headrace(worker, host=host, settings=settings) as proxy, proxy.connect() as connection:
        connection.settimeout(30)
        connection.sendall(f"POST {path} HTTP/1.1\r\nhost: test\r\ncontent-length: 10\r\n\r\n{{".encode())
        answer = read_until(connection, b"}}")
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"`body_timeout`" in answer
        assert connection.recv(1) == b""


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("path", [PATH, "/pause"])
@pytest.mark.parametrize("content", [b"x" * (3 * MIB // 2), [b"x" * (MIB // 2)] * 3], ids=["declared", "chunked"])
def test_a_body_over_the_limit_is_a_413(host, path, content):
    settings = "[server]\nmax_body_mib = 1\n"
    with workers.stand_in() as worker, headrace(worker, host=host, settings=settings) as proxy:
        response = httpx.post(f"{proxy.url}{path}", content=content, timeout=30, trust_env=False)
    assert response.status_code == 413
    assert "`max_body_mib`" in response.json()["error"]["message"]


def test_a_body_that_is_declared_too_large_is_not_asked_for():
    with workers.stand_in() as worker, headrace(worker) as proxy, proxy.connect() as connection:
        connection.settimeout(30)
        connection.sendall(f"POST {PATH} HTTP/1.1\r\nhost: test\r\ncontent-length: {65 * MIB}\r\nexpect: 100-continue\r\n\r\n".encode())
        assert read_until(connection, b"}}").startswith(b"HTTP/1.1 413 ")
        assert connection.recv(1) == b""
