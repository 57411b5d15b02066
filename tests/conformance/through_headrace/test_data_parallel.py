"""A worker with two data-parallel ranks: the rank that a client asks for, or a policy chooses, is the one that gets the call."""

from collections.abc import Iterator

import httpx
import pytest

from tests.conformance.ranks import Ranks
from tests.conformance.through_headrace.calls import PATH, body, events
from tests.conformance.through_headrace.conftest import PROBES, client_of
from tests.proxy import RunningProxy, headrace
from tests.workers import RunningWorker


@pytest.fixture(scope="module", params=["grpc", "http"])
def proxy(two_ranks: RunningWorker, request: pytest.FixtureRequest) -> Iterator[RunningProxy]:
    with headrace(two_ranks, wires=request.param, settings=PROBES) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def both(two_ranks: RunningWorker) -> Iterator[RunningProxy]:
    with headrace(two_ranks, settings=PROBES) as proxy:
        yield proxy


@pytest.fixture
def client(proxy: RunningProxy) -> Iterator[httpx.Client]:
    with client_of(proxy) as client:
        yield client


def test_the_rank_that_the_client_asks_for_gets_the_call(client, two_ranks):
    ranks, went = Ranks(two_ranks), []
    for rank in ("1", "0", "1"):
        assert client.post(PATH, json=body(), headers={"x-data-parallel-rank": rank}).status_code == 200
        went.append(ranks.since())
    client.headers["x-data-parallel-rank"] = "1"
    events(client, body())
    assert [*went, ranks.since()] == [1, 0, 1, 1]


def test_a_rank_that_is_none_is_refused(client):
    response = client.post(PATH, json=body(), headers={"x-data-parallel-rank": "one"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "x-data-parallel-rank")


def test_a_rank_that_exists_on_nobody_is_refused_with_those_that_there_are(both):
    with client_of(both) as client:
        response = client.post(PATH, json=body(), headers={"x-data-parallel-rank": "2"})
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "x-data-parallel-rank: there is no rank 2 on any worker; there are 0, 1"


def test_sessions_are_spread_over_the_ranks_and_stay_on_theirs(both, two_ranks):
    with client_of(both) as client:
        client.put("/fleet/routing", json={"policies": ["session", "least-loaded"]}).raise_for_status()
        ranks, went = Ranks(two_ranks), []
        for session in "abcd" * 2:
            assert client.post(PATH, json=body(), headers={"x-session-id": session}).status_code == 200
            went.append(ranks.since())
    assert went[:4] == went[4:]
    assert sorted(went[:4]) == [0, 0, 1, 1]


@pytest.mark.parametrize("asked", [None, "1"])
def test_a_relayed_call_goes_to_its_rank_too(both, two_ranks, asked):
    if two_ranks.kind == "stand-in":
        pytest.skip("it has none of the routes that are relayed")
    sent = {"model": two_ranks.model, "prompt": "Hello", "max_tokens": 2}
    headers = {"x-session-id": "relayed"} | ({"x-data-parallel-rank": asked} if asked else {})
    with client_of(both) as client:
        client.put("/fleet/routing", json={"policies": ["session", "least-loaded"]}).raise_for_status()
        ranks, went = Ranks(two_ranks), []
        for _ in range(3):
            response = client.post("/v1/completions", json=sent, headers=headers)
            assert response.status_code == 200, response.text
            went.append(ranks.since())
        explained = client.post("/fleet/route", json=body(), headers=headers).json()
    assert len(set(went)) == 1
    assert asked is None or went[0] == int(asked)
    assert explained["choice"]["rank"] in (0, 1)


def test_the_least_loaded_rank_gets_the_call(both, two_ranks):
    with client_of(both) as client:
        client.put("/fleet/routing", json={"policies": ["least-loaded"]}).raise_for_status()
        told = [client.post("/fleet/route", json=body()).json()["choice"] for _ in range(20)]
    assert {choice["rank"] for choice in told} == {0, 1}
    assert {choice["reason"] for choice in told} == {f"least-loaded: 0 tokens in flight on rank {rank}" for rank in (0, 1)}
