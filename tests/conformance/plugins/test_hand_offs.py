"""Hand-offs that come to nothing: whatever is refused, paused or updated between two workers, no block stays until its lease is over."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests import workers
from tests.conformance.plugins.handing import PAIR, body, in_flight, kept, legs, replies, send, tokens
from tests.proxy import RunningProxy, headrace, wait_for
from tests.workers import RunningWorker

#: Much longer than any test takes.
LEASE = 600.0
#: Seconds that a stand-in takes for a prompt: a test that acts meanwhile waits for its beginning.
PROMPT_SECONDS = 1.0

Pair = tuple[RunningProxy, RunningWorker, RunningWorker]


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with (
        workers.stand_in(kv_lease=LEASE) as first,
        workers.stand_in(kv_lease=LEASE, max_model_len=128, max_logprobs=2) as second,
        headrace(first, second, roles=PAIR) as proxy,
    ):
        yield proxy, first, second


@pytest.fixture(scope="module")
def slow() -> Iterator[Pair]:
    with (
        workers.stand_in(kv_lease=LEASE, token_delay=PROMPT_SECONDS) as first,
        workers.stand_in(kv_lease=LEASE) as second,
        headrace(first, second, roles=PAIR) as proxy,
    ):
        yield proxy, first, second


def administer(proxy: RunningProxy, path: str, **more: Any) -> None:
    httpx.post(f"{proxy.url}{path}", timeout=60, trust_env=False, **more).raise_for_status()


def wait_until_freed(*workers: RunningWorker) -> None:
    for worker in workers:
        wait_for(lambda worker=worker: not kept(worker))
        assert worker.metric("vllm:nixl_num_kv_expired_reqs_total") == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("sampling", "headers"),
    [
        ({}, {"x-data-parallel-rank": "5"}),
        ({"trace_decode_token_ids": [1]}, {}),
        ({"thinking_token_budget": -5}, {}),
        ({"stream_interval": 0}, {}),
        ({"stop_token_ids": [1_000_000]}, {}),
        ({"stop": ""}, {}),
        ({"stop": ["a", ""]}, {}),
        ({"prompt": [7] * 128}, {}),
        ({"min_tokens": 5}, {}),
        ({"min_tokens": 100, "max_tokens": 1000}, {}),
        ({"min_tokens": 100, "max_tokens": None}, {}),
    ],
)
def test_a_call_that_is_refused_is_refused_before_a_hand_off(pair, sampling, headers, stream):
    proxy, first, _ = pair
    response = send(proxy.url, body(stream=stream, **sampling), headers)
    assert response.status_code == 400, response.text
    assert not kept(first)
    assert not [leg for leg in legs(proxy, response.headers["x-request-id"]) if leg["outcome"] == "ok"]
    assert proxy.in_flight() == 0


@pytest.mark.parametrize("stream", [False, True])
def test_what_only_the_decode_worker_refuses_leaves_no_block_behind(pair, stream):
    proxy, first, second = pair
    response = send(proxy.url, body(stream=stream, logprobs=5))
    assert response.status_code == 400, response.text
    assert "max allowed: 2" in response.text
    assert [leg["outcome"] for leg in legs(proxy, response.headers["x-request-id"])] == ["ok"]
    wait_until_freed(first, second)


def test_a_prompt_is_computed_with_weights_that_a_decode_worker_has():
    with (
        workers.stand_in(kv_lease=LEASE) as newer,
        workers.stand_in(kv_lease=LEASE) as first,
        workers.stand_in(kv_lease=LEASE) as second,
        headrace(newer, first, second, roles=("prefill", *PAIR)) as proxy,
    ):
        administer(proxy, "/workers/w0/update_weight_version", json={"new_version": "7"})
        for _ in range(4):
            response = send(proxy.url, body())
            assert (response.status_code, response.headers["x-headrace-worker"]) == (200, "w2")
            assert response.headers["x-headrace-route"].startswith("prefill=w1 ")
        wait_until_freed(newer, first)


def test_weights_that_change_between_the_parts_leave_no_block_behind(slow):
    proxy, first, second = slow
    with ThreadPoolExecutor() as threads:
        sent = threads.submit(send, proxy.url, body())
        wait_for(lambda: in_flight(proxy, "w0"))
        administer(proxy, "/workers/w1/update_weight_version", json={"new_version": "8"})
        response = sent.result()
        administer(proxy, "/update_weight_version", json={"new_version": "8"})
    assert response.status_code == 503
    assert response.json()["error"]["message"] == "prefill: no prefill worker that is ready has the weights of a decode worker: '8'"
    wait_until_freed(first, second)


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_a_pause_aborts_in_its_prefill_ends_as_on_one_worker(slow, stream):
    proxy, first, second = slow
    with headrace(first) as alone:
        apart, whole = (aborted(one, first, body(stream=stream)) for one in (proxy, alone))
    assert apart == whole == ([], "abort")
    wait_until_freed(first, second)


def aborted(proxy: RunningProxy, worker: RunningWorker, sent: dict[str, Any]) -> tuple[list[int], str]:
    """The tokens of a call that a pause aborts while the worker computes its prompt, and its finish reason."""
    with ThreadPoolExecutor() as threads:
        asked = threads.submit(send, proxy.url, sent)
        wait_for(worker.running_requests)
        administer(proxy, "/pause?mode=abort")
        administer(proxy, "/resume")
        response = asked.result()
    assert response.status_code == 200, response.text
    return tokens(replies(response)), replies(response)[-1]["choices"][0]["finish_reason"]


@pytest.mark.parametrize("stream", [False, True])
def test_pauses_between_the_parts_leave_no_block_behind(slow, stream):
    proxy, first, second = slow
    name = f"paused-{stream}"
    with ThreadPoolExecutor() as threads:
        sent = threads.submit(send, proxy.url, body(stream=stream) | {"request_id": name})
        for number in (1, 2):
            wait_for(first.running_requests)
            administer(proxy, "/pause?mode=wait")
            wait_for(lambda number=number: len(legs(proxy, name)) == number)
            assert kept(first)
            administer(proxy, "/resume")
        response = sent.result()
    assert len(tokens(replies(response))) == 4
    assert [leg["outcome"] for leg in legs(proxy, name)] == ["ok"] * 3
    wait_until_freed(first, second)
