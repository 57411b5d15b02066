"""What Prime-RL's clients rely on, through a real headrace: the same on every worker, version and wire."""

from collections.abc import Iterator
from math import isfinite

import httpx
import pytest

from tests.conformance.conftest import Version
from tests.conformance.plugins.cached import ask
from tests.proxy import RunningProxy, headrace
from tests.workers import RunningWorker
from tests.workers.scripted_engine.behaviour import Behaviour

PROMPT = [72, 105, 33, 72, 105, 33, 72, 105]
SESSION = {"X-Session-ID": "0123456789abcdef"}


@pytest.fixture(scope="module", params=["grpc", "http"])
def proxy(worker: RunningWorker, request: pytest.FixtureRequest) -> Iterator[RunningProxy]:
    with headrace(worker, wires=request.param) as proxy:
        yield proxy


@pytest.fixture(scope="module", params=["grpc", "http"])
def scripted(scripted_worker: RunningWorker, request: pytest.FixtureRequest) -> Iterator[RunningProxy]:
    with headrace(scripted_worker, wires=request.param) as proxy:
        yield proxy


def test_tokens_are_named_and_their_logprobs_finite(proxy):
    [choice] = ask(proxy, PROMPT, {"logprobs": 1, "max_tokens": 5}, headers=SESSION).json()["choices"]
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [f"token_id:{token_id}" for token_id in choice["token_ids"]]
    assert all(isfinite(entry["logprob"]) and -9999.0 < entry["logprob"] <= 0 for entry in content)


def test_usage_counts_the_prompt_and_the_output(proxy):
    usage = ask(proxy, PROMPT, {"max_tokens": 5, "ignore_eos": True}, headers=SESSION).json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (8, 5, 13)


@pytest.mark.parametrize("candidates", [0, 1, 5])
def test_prefill_scoring_reads_the_prompts_own_tokens_first(proxy, candidates):
    # In the words of Prime-RL's orchestrator: no session, no salt.
    reply = ask(proxy, PROMPT, {"max_tokens": 1, "temperature": 1.0, "top_p": 1.0, "prompt_logprobs": candidates})
    first, *positions = reply.json()["prompt_logprobs"]
    assert first is None
    assert [next(iter(position)) for position in positions] == [str(token_id) for token_id in PROMPT[1:]]
    own = [next(iter(position.values())) for position in positions]
    assert any(entry["rank"] > 1 for entry in own), "else the own token would come first anyhow"
    assert all(isfinite(entry["logprob"]) for entry in own)


@pytest.mark.parametrize("setting", ["grpc", "http"])
def test_a_key_that_nobody_knows_is_ignored_in_a_session(stand_in_worker, setting):
    with headrace(stand_in_worker, wires=setting) as proxy:
        for _ in range(2):
            reply = ask(proxy, PROMPT, {"nobody_knows": {"this": 1}, "routed_experts_prompt_start": 4}, headers=SESSION)
            assert reply.status_code == 200, reply.text
        assert [event["key"] for event in proxy.events("sampling_params.ignored")] == ["nobody_knows", "routed_experts_prompt_start"]
        refused = ask(proxy, PROMPT, {"nobody_knows": {"this": 1}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "sampling_params.nobody_knows")


@pytest.mark.parametrize("beyond", [0, 1000])
@pytest.mark.parametrize("max_tokens", [None, 4])
def test_an_over_long_prompt_is_a_400_with_the_phrases_that_clients_match(proxy, worker, version: Version, beyond, max_tokens):
    length = worker.max_model_len + beyond
    reply = ask(proxy, [65] * length, {"max_tokens": max_tokens}, headers=SESSION)
    message = reply.json()["error"]["message"]
    assert reply.status_code == 400
    assert f"this model's maximum context length is {worker.max_model_len} tokens" in message.lower()
    assert str(length) in message
    if worker.kind != "stand-in":  # which has words of its own for the rest
        assert ("prompt contains" if version == (0, 31) or beyond else "your prompt fills it with") in message


def test_without_max_tokens_the_output_may_fill_the_context(proxy, worker):
    reply = ask(proxy, [65] * (worker.max_model_len - 3), {"max_tokens": None, "ignore_eos": True}, headers=SESSION).json()
    assert (reply["usage"]["completion_tokens"], reply["choices"][0]["finish_reason"]) == (3, "length")


def test_a_logprob_that_is_not_finite_is_an_error_that_says_where(scripted):
    prompt = [Behaviour.NAN_LOGPROB, 65, 66]
    reply = ask(scripted, prompt, {"logprobs": 1}, headers=SESSION)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (500, "choices[0].logprobs.content[0]")
    assert "-9999.0" in error["message"]
    assert ask(scripted, prompt, headers=SESSION).status_code == 200, "who doesn't ask isn't troubled"


def test_a_session_can_be_finished_again_and_again(proxy):
    for _ in range(2):
        reply = httpx.post(f"{proxy.url}/finish_session?session_id=0123456789abcdef")
        assert (reply.status_code, reply.json()) == (200, {"status": "ok"})
    refused = httpx.post(f"{proxy.url}/finish_session")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "session_id")
