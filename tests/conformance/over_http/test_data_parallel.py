"""A server of several data-parallel ranks, each of several GPUs: what is asked of it is asked of all of them."""

from collections.abc import Iterator

import httpx
import pytest

from tests.conformance.ranks import Ranks
from tests.workers import RunningWorker

PATH = "/inference/v1/generate"


@pytest.fixture
def client(two_ranks: RunningWorker) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=two_ranks.http, timeout=30, trust_env=False) as client:
        yield client


def test_each_call_goes_to_the_rank_of_its_header_and_one_that_is_none_is_ignored(client, two_ranks):
    ranks, went = Ranks(two_ranks), []
    for rank in ("1", "0", "1", "-1", "x", "4294967296"):
        sent = {"token_ids": [72, 105], "sampling_params": {"max_tokens": 2}}
        assert client.post(PATH, json=sent, headers={"x-data-parallel-rank": rank}).status_code == 200
        went.append(ranks.since())
    assert went[:3] == [1, 0, 1]


@pytest.mark.parametrize("stream", [False, True])
def test_a_rank_that_is_not_there_is_refused(client, stream):
    sent = {"token_ids": [72, 105], "sampling_params": {"max_tokens": 2}, "stream": stream}
    response = client.post(PATH, json=sent, headers={"x-data-parallel-rank": "2"})
    assert (response.status_code, response.json()["error"]["type"]) == (400, "BadRequestError")


def test_the_gpus_of_all_ranks_are_counted(client):
    assert client.get("/get_world_size").json() == {"world_size": 6}
    assert client.get("/get_world_size", params={"include_dp": "false"}).json() == {"world_size": 3}


def test_a_method_is_called_on_every_gpu(client):
    called = client.post("/collective_rpc", json={"method": "reload_weights"})
    assert called.json() == {"results": [None] * 6}
