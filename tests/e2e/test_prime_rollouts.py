"""Prime-RL's own rollout client, unchanged, against headrace: several turns, two salts at once, sessions, bridged turns."""

import base64
import struct
from collections.abc import Iterator
from math import isfinite
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import clients, workers
from tests.clients import PRIME_RL, PrimeRelease
from tests.proxy import RunningProxy, headrace
from tests.workers import RunningWorker, tiny_model

# It needs a download in any case: the client.
pytestmark = pytest.mark.real

TURNS = ["What is the answer?", "And the one to the other question?", "Thank you."]
#: Its prompt has exactly as many tokens as the context: the client lets it pass, the worker doesn't.
TOO_LONG = "x" * (tiny_model.MAX_MODEL_LEN - 15)
SALTS = ["3", "4"]
#: As Prime-RL's configuration has it, with a key that another server knows; seeded, for a model that ends its answer with the very last
#: token that it may is another case.
SAMPLING: dict[str, Any] = {"temperature": 0.9, "top_p": 1.0, "max_tokens": 12, "min_p": 0.05, "seed": 7}
EXTRA_BODY = {"not_for_us": {"max": 1}}


@pytest.fixture(scope="module", params=list(PRIME_RL))
def release(request: pytest.FixtureRequest) -> PrimeRelease:
    if reason := clients.why_not(request.param):
        pytest.skip(f"no client of Prime-RL here: {reason}")
    return request.param


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_model.write(folder)
    return folder


@pytest.fixture(scope="module")
def proxy(worker: RunningWorker) -> Iterator[RunningProxy]:
    with headrace(worker) as proxy:
        yield proxy


def sampling(salt: str) -> dict[str, Any]:
    return {**SAMPLING, "extra_body": {"cache_salt": salt, **EXTRA_BODY}}


def order_for(proxy: RunningProxy, tokenizer: Path, *turns: list[str]) -> dict[str, Any]:
    """Rollouts with each of these turns for each salt in turn."""
    rollouts = [{"turns": each, "sampling": sampling(salt)} for salt in SALTS for each in turns]
    return {"url": f"{proxy.url}/v1", "model": "tiny", "tokenizer": str(tokenizer), "rollouts": rollouts}


@pytest.fixture(scope="module")
def rollouts(release: PrimeRelease, proxy: RunningProxy, tokenizer: Path) -> list[list[dict[str, Any]]]:
    """For each salt a rollout of several turns, and one whose prompt is too long."""
    told = clients.roll_out(release, order_for(proxy, tokenizer, TURNS, [TOO_LONG]))["rollouts"]
    return [told[:2], told[2:]]


def test_a_rollout_of_several_turns_works_unchanged(rollouts):
    for rollout, _ in rollouts:
        assert [turn.get("error") for turn in rollout["turns"]] == [None] * len(TURNS)
        assert [turn["bridged"] for turn in rollout["turns"]] == [False, True, True]
        sequence: list[int] = []
        for turn in rollout["turns"]:
            assert turn["prompt"][: len(sequence)] == sequence, "a bridged turn goes on from the very tokens of the turn before"
            assert 0 < len(turn["completion"]) <= SAMPLING["max_tokens"]
            assert len(turn["logprobs"]) == len(turn["completion"])
            assert all(isfinite(logprob) and -9999.0 < logprob <= 0 for logprob in turn["logprobs"])
            assert turn["finish"] == ("length" if len(turn["completion"]) == SAMPLING["max_tokens"] else "stop")
            sequence = turn["prompt"] + turn["completion"]
        assert rollout["branches"] == [sequence], "its trainer sees one sequence"


def test_an_over_long_prompt_is_what_the_client_takes_for_one(rollouts, release):
    for _, rollout in rollouts:
        [turn] = rollout["turns"]
        assert turn["error"].startswith("OverlongPromptError" if release == "reference" else "ProviderError")
        assert "maximum context length is 2048 tokens" in turn["error"]
        assert release == "reference" or turn["status"] == 400


def test_every_turn_goes_over_grpc_and_what_was_ignored_is_in_the_log_once(rollouts, proxy):
    assert {event["wire"] for event in proxy.events("call.settled")} == {"grpc"}
    ignored = [event["key"] for event in proxy.events("sampling_params.ignored")]
    assert sorted(ignored) == ["not_for_us", "routed_experts_prompt_start"]


def test_a_session_ends_when_its_client_says_so(rollouts, proxy):
    for rollout, _ in rollouts:
        for _ in range(2):
            assert httpx.post(f"{proxy.url}/finish_session", params={"session_id": rollout["session"]}).is_success


def test_the_engine_gets_the_salt_of_each_rollout_and_nothing_added(scripted_worker, release, tokenizer):
    before = len(scripted_worker.engine_events())
    with headrace(scripted_worker) as proxy:
        order = order_for(proxy, tokenizer, TURNS)
        order["evaluations"] = [{"turns": TURNS[:1], "sampling": sampling(salt)} for salt in SALTS]
        told = clients.roll_out(release, order)
    assert [evaluation["finish"] for evaluation in told["evaluations"]] == ["length"] * 2
    added = [event for event in scripted_worker.engine_events()[before:] if event["event"] == "add"]
    got = [(event["cache_salt"], event["prompt_token_ids"]) for event in added]
    for salt, rollout in zip(SALTS, told["rollouts"], strict=True):
        for turn in rollout["turns"]:
            got.remove((salt, turn["prompt"]))
    assert sorted(salt for salt, _ in got) == SALTS, "what is left are the evaluations"


# --- routed experts ----------------------------------------------------------------------------------------------------------------

#: Prime-RL's clients ask for nothing, and take what comes.
ALWAYS = "[plugins.routed-experts]\nalways = true"
#: Two layers, two experts for each token, a byte each; of the scripted engine and of the tiny mixture of experts alike.
ROW = struct.Struct("4B")


@pytest.fixture(scope="module")
def scripted_router() -> Iterator[RunningWorker]:
    if reason := workers.why_not("scripted"):
        pytest.skip(f"no scripted worker here: {reason}")
    with workers.scripted(routed_experts=True) as worker:
        yield worker


@pytest.fixture(params=["scripted_router", "routing_worker"])
def router(request: pytest.FixtureRequest) -> RunningWorker:
    """The real server with an engine that captures routing: a scripted, and a real one."""
    return request.getfixturevalue(request.param)


def test_the_routed_experts_of_several_turns_merge_to_the_rows_of_the_whole_rollout(router, release, tokenizer):
    with headrace(router, settings=ALWAYS) as proxy:
        rollouts = clients.roll_out(release, order_for(proxy, tokenizer, TURNS))["rollouts"]
        assert {event["wire"] for event in proxy.events("call.settled")} == {"http"}
    for rollout in rollouts:
        assert [turn.get("error") for turn in rollout["turns"]] == [None] * len(TURNS)
        [sequence], [rows] = rollout["branches"], rollout["routed"]
        expected = rows_of(router, sequence)
        assert len(set(expected)) > 2
        # Nothing is computed from the last token of a turn while the turn lasts; the client has the row before stand there. The newer
        # one replaces it by that of the next turn.
        ends = [len(turn["prompt"]) + len(turn["completion"]) - 1 for turn in rollout["turns"]]
        for end in ends if release == "reference" else ends[-1:]:
            expected[end] = expected[end - 1]
        assert [tuple(expert for layer in row for expert in layer) for row in rows] == expected


def rows_of(worker: RunningWorker, sequence: list[int]) -> list[tuple[int, ...]]:
    """The row of each token, asked from the worker itself: those of a prompt."""
    body = {"token_ids": sequence, "sampling_params": {"max_tokens": 1, "temperature": 0.0, "routed_experts_prompt_start": 0}}
    reply = httpx.post(f"{worker.http}/inference/v1/generate", json=body, timeout=60).raise_for_status()
    file = base64.b64decode(reply.json()["choices"][0]["routed_experts"])
    return list(ROW.iter_unpack(file[10 + int.from_bytes(file[8:10], "little") :]))
