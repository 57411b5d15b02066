"""Hand-offs that come to nothing: whatever is refused, paused or updated between two workers, no block stays until its lease is over."""

from collections.abc import Iterator

import pytest

from tests import workers
from tests.conformance.plugins.handing import PAIR, body, kept, legs, send
from tests.proxy import RunningProxy, headrace
from tests.workers import RunningWorker

#: Much longer than any test takes.
LEASE = 600.0

Pair = tuple[RunningProxy, RunningWorker, RunningWorker]


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with (
        workers.stand_in(kv_lease=LEASE) as first,
        workers.stand_in(kv_lease=LEASE, max_model_len=128) as second,
        headrace(first, second, roles=PAIR) as proxy,
    ):
        yield proxy, first, second


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
