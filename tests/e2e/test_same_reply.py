"""Through headrace comes what the worker itself answers, token for token and log-probability for log-probability."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.replies import ask, body
from tests.proxy import RunningProxy, Wires, headrace
from tests.workers import RunningWorker

PROMPTS = {"short": b"Hello, w!", "one token": b"A", "long": b"The quick brown fox jumps over the lazy dog. " * 3}
GREEDY: dict[str, Any] = {"temperature": 0.0}
SEEDED: dict[str, Any] = {"temperature": 1.0, "seed": 11, "top_p": 0.95}
WIRES: tuple[Wires, ...] = ("grpc", "http")
MODES = {"greedy": GREEDY, "seeded": SEEDED}


@pytest.fixture(scope="module", params=["scripted_worker", "engine_worker"])
def worker(request: pytest.FixtureRequest) -> RunningWorker:
    """The real servers, with a scripted and with the real engine."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module", params=WIRES)
def proxy(worker: RunningWorker, request: pytest.FixtureRequest) -> Iterator[RunningProxy]:
    """headrace in front of the worker, over one wire."""
    with headrace(worker, wires=request.param) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def direct(worker: RunningWorker):
    """What the worker answers by itself; each call is asked once."""
    answers = {}

    def ask_worker(prompt, tokens, **sampling):
        key = (prompt, tokens, *sorted(sampling.items()))
        if key not in answers:
            answers[key] = ask(worker.http, body(prompt, tokens, **sampling))
        return answers[key]

    return ask_worker


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tokens", [1, 2, 17])
@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
def test_any_length_is_the_same(proxy, direct, mode, tokens, stream):
    got = ask(proxy.url, body(PROMPTS["short"], tokens, stream=stream, **MODES[mode]))
    assert got == direct(PROMPTS["short"], tokens, **MODES[mode])
    assert (len(got.tokens), got.finish_reason) == (tokens, "length")


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
def test_a_long_output_is_the_same(proxy, direct, stream):
    assert ask(proxy.url, body(PROMPTS["short"], 300, stream=stream, **SEEDED)) == direct(PROMPTS["short"], 300, **SEEDED)


@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
def test_any_prompt_is_answered_the_same(proxy, direct, name, stream):
    for mode in MODES.values():
        assert ask(proxy.url, body(PROMPTS[name], 24, stream=stream, **mode)) == direct(PROMPTS[name], 24, **mode)


def test_prompt_logprobs_are_the_same(proxy, direct):
    for name in PROMPTS:
        got = ask(proxy.url, body(PROMPTS[name], 2, prompt_logprobs=2, **GREEDY))
        assert got == direct(PROMPTS[name], 2, prompt_logprobs=2, **GREEDY)
        assert len(got.prompt) == len(PROMPTS[name])


def test_different_seeds_differ_and_the_same_seed_does_not(proxy):
    replies = [ask(proxy.url, body(PROMPTS["short"], 24, temperature=1.0, seed=seed)) for seed in (1, 2, 1)]
    assert replies[0] == replies[2] != replies[1]


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
@pytest.mark.parametrize("wire", WIRES)
def test_almost_the_whole_context_is_the_same(scripted_worker, wire, stream):
    expected = ask(scripted_worker.http, body(PROMPTS["long"], 1900, **SEEDED))
    with headrace(scripted_worker, wires=wire) as proxy:
        assert ask(proxy.url, body(PROMPTS["long"], 1900, stream=stream, **SEEDED)) == expected


def test_almost_the_whole_context_of_the_real_engine_is_the_same(engine_worker):
    # Once only: a quiet machine with two cores takes ten seconds for these tokens, a busy one a minute.
    expected = ask(engine_worker.http, body(PROMPTS["long"], 1900, **SEEDED))
    with headrace(engine_worker, wires="grpc") as proxy:
        assert ask(proxy.url, body(PROMPTS["long"], 1900, **SEEDED)) == expected
