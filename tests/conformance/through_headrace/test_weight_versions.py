"""Which policy version made each token: the same over gRPC, which doesn't tell, as what the worker's HTTP server says."""

import json
from collections.abc import Iterator

import httpx
import pytest

from tests import workers
from tests.conformance.through_headrace.calls import PATH, body, events, reply
from tests.conformance.through_headrace.conftest import PROBES, client_of
from tests.proxy import RunningProxy, headrace
from tests.workers import RunningWorker


@pytest.fixture(scope="module", params=["grpc", "http"])
def on_wire(current_worker: RunningWorker, request: pytest.FixtureRequest) -> Iterator[RunningProxy]:
    """In front of each worker of 0.33, over one wire."""
    with headrace(current_worker, wires=request.param, settings=PROBES) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def slow_stand_in() -> Iterator[RunningWorker]:
    with workers.stand_in(token_delay=0.005) as worker:
        yield worker


def label(proxy: RunningProxy, version: str) -> None:
    httpx.post(f"{proxy.url}/update_weight_version", json={"new_version": version}, timeout=30).raise_for_status()


@pytest.mark.parametrize("n", [1, 2])
def test_a_reply_has_the_spans_of_the_workers_own(on_wire, current_worker, n):
    sent = body(sampling={"seed": 1})
    with httpx.Client(base_url=current_worker.http, timeout=60) as direct, client_of(on_wire) as client:
        label(on_wire, "default")
        own = reply(direct, sent)["choices"][0]["weight_versions"]
        spans = [choice["weight_versions"] for choice in reply(client, body(sampling={"seed": 1, "n": n}))["choices"]]
    assert own == [{"version": "default", "start": 0, "end": 4}]
    assert spans == [own] * n


def test_a_stream_has_them_in_its_last_chunk_like_the_workers_own(on_wire, current_worker):
    with httpx.Client(base_url=current_worker.http, timeout=60) as direct, client_of(on_wire) as client:
        label(on_wire, "12")
        own = [chunk["choices"][0].get("weight_versions") for chunk in events(direct, body())]
        spans = [chunk["choices"][0].get("weight_versions") for chunk in events(client, body())]
        label(on_wire, "default")
    assert own[-1] == spans[-1] == [{"version": "12", "start": 0, "end": 4}]
    assert not any(own[:-1])
    assert not any(spans[:-1])


def test_a_stream_that_was_frozen_for_an_update_says_which_tokens_are_new(slow_stand_in):
    """What came before the engine was frozen is of the old version; all that came after is of the new one."""
    with headrace(slow_stand_in, wires="grpc", settings=PROBES) as proxy, client_of(proxy) as client:
        label(proxy, "7")
        received, before, spans = 0, 0, None
        sent = body(sampling={"max_tokens": 400}, stream=True)
        with client.stream("POST", PATH, json=sent) as response:
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                [choice] = json.loads(line.removeprefix("data: "))["choices"]
                received += len(choice["token_ids"])
                spans = choice.get("weight_versions")
                if not before and received >= 5:
                    httpx.post(f"{proxy.url}/pause?mode=keep&clear_cache=false", timeout=30).raise_for_status()
                    before = received
                    label(proxy, "8")
                    httpx.post(f"{proxy.url}/resume", timeout=30).raise_for_status()
        label(proxy, "default")
    assert spans is not None
    old, new = spans
    assert (old["version"], old["start"], new["version"], new["end"]) == ("7", 0, "8", 400)
    # At least what the client had read; beyond that only what was on its way when the engine was frozen.
    assert before <= old["end"] == new["start"] < 400
