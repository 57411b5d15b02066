"""Through headrace comes what the worker itself answers, token for token and log-probability for log-probability."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.replies import ask, body
from tests.proxy import RunningProxy, Wires, headrace
from tests.workers import RunningWorker

PROMPTS = {"short": b"Hello, w!", "one token": b"A", "long": b"The quick brown fox jumps over the lazy dog. " * 3}
#: Of an output; every worker's context has room for 2,048 tokens.
LONGEST = 2000
GREEDY: dict[str, Any] = {"temperature": 0.0}
SEEDED: dict[str, Any] = {"temperature": 1.0, "seed": 11, "top_p": 0.95}
WIRES: tuple[Wires, ...] = ("grpc", "http")
MODES = {"greedy": GREEDY, "seeded": SEEDED}


@pytest.fixture(scope="module", params=["scripted_worker", "engine_worker"])
def worker(request: pytest.FixtureRequest) -> RunningWorker:
    """The real servers, with a scripted and with the real engine."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module", params=WIRES)
def wire(request: pytest.FixtureRequest) -> Wires:
    return request.param


@pytest.fixture(scope="module")
def proxy(worker: RunningWorker, wire: Wires) -> Iterator[RunningProxy]:
    """headrace in front of the worker, over one wire."""
    with headrace(worker, wires=wire) as proxy:
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
    expected = direct(PROMPTS["short"], tokens, **MODES[mode])
    got = ask(proxy.url, body(PROMPTS["short"], tokens, stream=stream, **MODES[mode]))
    assert got.as_told_by(expected) == expected
    assert (len(got.tokens), got.finish_reason) == (tokens, "length")


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
def test_a_long_output_is_the_same(proxy, direct, stream):
    expected = direct(PROMPTS["short"], 300, **SEEDED)
    assert ask(proxy.url, body(PROMPTS["short"], 300, stream=stream, **SEEDED)).as_told_by(expected) == expected


@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
def test_any_prompt_is_answered_the_same(proxy, direct, name, stream):
    for mode in MODES.values():
        expected = direct(PROMPTS[name], 24, **mode)
        assert ask(proxy.url, body(PROMPTS[name], 24, stream=stream, **mode)).as_told_by(expected) == expected


def test_prompt_logprobs_are_the_same(proxy, direct):
    for name in PROMPTS:
        expected = direct(PROMPTS[name], 2, prompt_logprobs=2, **GREEDY)
        got = ask(proxy.url, body(PROMPTS[name], 2, prompt_logprobs=2, **GREEDY))
        assert got.as_told_by(expected) == expected
        assert len(got.prompt) == len(PROMPTS[name])


def test_different_seeds_differ_and_the_same_seed_does_not(proxy):
    replies = [ask(proxy.url, body(PROMPTS["short"], 24, temperature=1.0, seed=seed)) for seed in (1, 2, 1)]
    assert replies[0] == replies[2] != replies[1]


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
def test_a_stop_and_its_reason_are_the_same(proxy, direct, stream):
    stop = direct(PROMPTS["short"], 17, **GREEDY).tokens[8]
    expected = direct(PROMPTS["short"], 17, stop_token_ids=(stop,), **GREEDY)
    assert expected.finish_reason == "stop"
    got = ask(proxy.url, body(PROMPTS["short"], 17, stream=stream, stop_token_ids=(stop,), **GREEDY))
    assert got.stop_reason == stop or not any(got.ranks)
    assert got.as_told_by(expected) == expected


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
def test_almost_the_whole_context_is_the_same(worker, wire, proxy, direct, stream):
    # A quiet machine with two cores takes ten seconds for so many tokens of the real engine, a busy one a minute. There each wire, and each
    # way to answer, is once with each mode, and one pair of them with all the tokens.
    scripted = worker.kind == "scripted"
    length = LONGEST if scripted or (wire, stream) == ("grpc", False) else LONGEST // 2
    for mode in MODES if scripted else ["seeded" if (wire == "grpc") != stream else "greedy"]:
        expected = direct(PROMPTS["one token"], length, **MODES[mode])
        got = ask(proxy.url, body(PROMPTS["one token"], length, stream=stream, **MODES[mode]))
        assert got.as_told_by(expected) == expected
        assert len(got.tokens) == length
