"""Salts through a real headrace: one prefix cache for each, wherever a client wrote it, on every worker and either wire."""

import itertools
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.conformance.plugins.cached import ask, cached_tokens
from tests.proxy import RunningProxy, Wires, headrace, wait_for
from tests.workers import RunningWorker

RULE = r"Parameter 'cache_salt' must be a non-empty string of at most 128 characters and must not contain '@', '/', '\', or NUL."
#: Whole blocks of every worker (16 tokens; vLLM on a CPU has 128), and one token more, which is always computed.
CACHED = 3 * 128
BY_VERSION = '[plugins.cache-salt]\ndefault = "weight-version"\n[probe]\ninterval = 0.1'
PLACES = {
    "the body": lambda salt: {"cache_salt": salt},
    "sampling_params": lambda salt: {"sampling": {"cache_salt": salt}},
    "extra_body": lambda salt: {"extra_body": {"cache_salt": salt}},
    "nvext": lambda salt: {"nvext": {"cache_salt": salt}},
    "header": lambda salt: {"headers": {"X-Cache-Salt": salt}},
}
_numbers = itertools.count()


@pytest.fixture(scope="module", params=["grpc", "http"])
def wires(request: pytest.FixtureRequest) -> Wires:
    return request.param


@pytest.fixture(scope="module")
def proxy(worker: RunningWorker, wires: Wires) -> Iterator[RunningProxy]:
    with headrace(worker, wires=wires) as proxy:
        yield proxy


@pytest.fixture
def prompt() -> list[int]:
    """One that no other test has."""
    number = next(_numbers)
    return [100 + number // 200, 40 + number % 200, *(40 + position % 200 for position in range(CACHED - 1))]


@pytest.fixture
def labelled(worker: RunningWorker):
    """Labels the worker's weights; at the end they have their first label again."""

    def label(version: str) -> None:
        httpx.post(f"{worker.http}/update_weight_version", json={"new_version": version}, timeout=30).raise_for_status()

    yield label
    label("default")


@pytest.mark.parametrize("place", PLACES)
def test_the_same_prompt_shares_cached_tokens_under_one_salt_and_not_under_two(worker, proxy, prompt, place):
    assert cached_tokens(worker, proxy, prompt, **PLACES[place]("7")) == 0
    assert cached_tokens(worker, proxy, prompt, **PLACES[place]("8")) == 0
    assert cached_tokens(worker, proxy, prompt) == 0
    assert cached_tokens(worker, proxy, prompt, **PLACES[place]("7")) == CACHED
    assert cached_tokens(worker, proxy, prompt, cache_salt="8") == CACHED


def test_equal_salts_in_all_places_are_one(worker, proxy, prompt):
    everywhere: dict[str, Any] = {}
    for write in PLACES.values():
        everywhere |= write("7")
    assert cached_tokens(worker, proxy, prompt, **everywhere) == 0
    assert cached_tokens(worker, proxy, prompt, cache_salt="7") == CACHED


def test_different_salts_are_refused(proxy, prompt):
    reply = ask(proxy, prompt, {"cache_salt": "8"}, cache_salt="7")
    assert (reply.status_code, reply.json()["error"]) == (
        400,
        {
            "message": "cache_salt: the body says '7' and sampling_params.cache_salt says '8'; send one",
            "type": "BadRequestError",
            "param": "sampling_params.cache_salt",
            "code": 400,
        },
    )


@pytest.mark.parametrize("salt", ["", "x" * 129, "a@b", "a/b", "a\\b", "a\0b"])
def test_no_worker_gets_a_salt_that_one_of_them_refuses(proxy, prompt, salt):
    reply = ask(proxy, prompt, cache_salt=salt)
    assert (reply.status_code, reply.json()["error"]["message"]) == (400, RULE)


@pytest.mark.parametrize("salt", ["", "x" * 129, "a@b", "a/b", "a\\b", "a\0b", "x" * 128, "ü" * 128, "a b", "-"])
def test_what_is_refused_is_what_vllm_refuses_in_the_same_words(scripted_worker, prompt, salt):
    body = {"token_ids": prompt, "sampling_params": {"max_tokens": 1}, "cache_salt": salt}
    with headrace(scripted_worker) as proxy:
        ours, theirs = (httpx.post(f"{url}/inference/v1/generate", json=body, timeout=30) for url in (proxy.url, scripted_worker.http))
    assert ours.status_code == theirs.status_code
    assert ours.json().get("error", {}).get("message") == theirs.json().get("error", {}).get("message")


def test_by_default_the_salt_can_be_the_policy_version_of_the_worker(worker, wires, prompt, labelled):
    labelled("step-7")
    with headrace(worker, wires=wires, settings=BY_VERSION) as proxy:
        assert cached_tokens(worker, proxy, prompt) == 0
        assert cached_tokens(worker, proxy, prompt) == CACHED
        assert cached_tokens(worker, proxy, prompt, cache_salt="step-7") == CACHED
        labelled("run/8")
        wait_for(lambda: [entry["policy_version"] for entry in proxy.fleet()] == ["run/8"])
        assert cached_tokens(worker, proxy, prompt) == 0
        assert cached_tokens(worker, proxy, prompt) == CACHED


def test_a_salt_can_be_required(stand_in_worker, prompt):
    with headrace(stand_in_worker, settings="[plugins.cache-salt]\nrequire = true") as proxy:
        assert ask(proxy, prompt).json()["error"]["param"] == "cache_salt"
        assert ask(proxy, prompt, {"cache_salt": "0"}).status_code == 200


# --- relayed routes --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def complete(scripted_worker: RunningWorker):
    """Relays a completion, and returns the salt that the engine got; or the refusal."""

    def make(proxy: RunningProxy, headers: dict[str, str] | None = None, **body: Any) -> Any:
        before = len(scripted_worker.engine_events())
        body = {"model": scripted_worker.model, "prompt": "hello", "max_tokens": 1, **body}
        reply = httpx.post(f"{proxy.url}/v1/completions", json=body, headers=headers, timeout=30)
        if reply.is_error:
            return reply.json()["error"]
        return scripted_worker.wait_for_event("add", since=before)["cache_salt"]

    return make


@pytest.mark.parametrize("place", [place for place in PLACES if place != "sampling_params"])
def test_a_relayed_route_has_its_salt_from_every_place(scripted_worker, complete, place):
    with headrace(scripted_worker) as proxy:
        assert complete(proxy, **PLACES[place]("7")) == "7"
        assert complete(proxy) is None


def test_a_relayed_route_refuses_different_salts(scripted_worker, complete):
    with headrace(scripted_worker) as proxy:
        error = complete(proxy, extra_body={"cache_salt": "8", "top_k": 1}, cache_salt="7")
    assert error["message"] == "cache_salt: the body says '7' and extra_body.cache_salt says '8'; send one"


def test_a_relayed_route_has_the_policy_version_as_its_salt(scripted_worker, complete):
    with headrace(scripted_worker, settings=BY_VERSION) as proxy:
        assert complete(proxy) == "default"
        assert complete(proxy, cache_salt="7") == "7"


def test_a_relayed_route_that_touches_no_kv_needs_no_salt(scripted_worker, complete):
    with headrace(scripted_worker, settings="[plugins.cache-salt]\nrequire = true") as proxy:
        assert complete(proxy)["param"] == "cache_salt"
        for route, body in (("/tokenize", {"prompt": "hello"}), ("/detokenize", {"tokens": [72, 105]})):
            reply = httpx.post(f"{proxy.url}{route}", json={"model": scripted_worker.model, **body}, timeout=30)
            assert (route, reply.status_code) == (route, 200), reply.text
