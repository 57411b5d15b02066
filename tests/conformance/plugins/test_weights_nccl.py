"""The transports `nccl` and `broadcast` through a real headrace: what reaches each engine, at the same time, and what a worker refuses."""

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests import workers
from tests.proxy import RunningProxy, headrace, wait_for
from tests.workers import RunningWorker

UPDATE = {"names": ["w"], "dtype_names": ["float32"], "shapes": [[1]]}
Pair = tuple[RunningProxy, RunningWorker, RunningWorker]


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    """headrace in front of two real servers with scripted engines, of one rank and of three, which know `receive_broadcast`."""
    if reason := workers.why_not("scripted"):
        pytest.skip(f"no scripted worker here: {reason}")
    known: dict[str, Any] = {"extension_methods": ["receive_broadcast"]}
    with workers.scripted(**known) as a, workers.scripted(**known, world_size=3) as b, headrace(a, b) as proxy:
        yield proxy, a, b


def post(proxy: RunningProxy, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{proxy.url}{path}", json=body, timeout=30)


def update(proxy: RunningProxy, version: str, transport: str, **options: Any) -> httpx.Response:
    return post(proxy, "/fleet/updates", {"version": version, "transport": transport, "wait": True, **options})


def calls(worker: RunningWorker, since: int = 0) -> list[list[Any]]:
    """Worker methods that have reached the engine, with their arguments."""
    utilities = [event for event in worker.engine_events("utility") if event["method"] == "collective_rpc"]
    return [event["args"] for event in utilities[since:]]


@pytest.mark.real
def test_each_engine_takes_vllms_steps_with_all_chunks(pair):
    proxy, *both = pair
    group = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 5}
    post(proxy, "/init_weight_transfer_engine", {"init_info": group}).raise_for_status()
    since = [len(calls(worker)) for worker in both]
    chunks = [{**UPDATE, "names": [name]} for name in "ab"]
    told = update(proxy, "7", "nccl", chunks=chunks).raise_for_status().json()
    assert told["status"] == "succeeded"
    for worker, before in zip(both, since, strict=True):
        steps = [call for call in calls(worker, before) if "weight" in call[0]]
        assert [call[0] for call in steps][:4] == ["start_weight_update", "update_weights", "update_weights", "finish_weight_update"]
        assert ["'a'" in str(steps[1]), "'b'" in str(steps[2])] == [True, True]
    assert [worker["policy_version"] for worker in proxy.fleet()] == ["7", "7"]


@pytest.mark.real
def test_each_engine_is_told_its_place_in_a_broadcast_and_who_is_awaited_is_shown(pair):
    proxy, *both = pair
    since = [len(calls(worker)) for worker in both]
    both[1].order("script_stall", "receive_broadcast", 1.5)
    answers: list[httpx.Response] = []
    meeting = {"host": "10.0.0.1", "port": 29500, "number": 1}
    thread = threading.Thread(target=lambda: answers.append(update(proxy, "8", "broadcast", **meeting)))
    thread.start()
    told = wait_for(lambda: _alone_awaited(proxy))
    assert {id_: one["status"] for id_, one in told["workers"].items()} == {"w0": "applying", "w1": "applying"}
    thread.join(timeout=30)
    assert answers[0].raise_for_status().json()["status"] == "succeeded"
    sent = [
        next(call for call in calls(worker, before) if call[0] == "receive_broadcast") for worker, before in zip(both, since, strict=True)
    ]
    assert ["'rank_offset': 1" in str(sent[0]), "'rank_offset': 2" in str(sent[1])] == [True, True]
    assert all("'world_size': 5" in str(one) and "'host': '10.0.0.1'" in str(one) for one in sent)
    assert [worker["policy_version"] for worker in proxy.fleet()] == ["8", "8"]


def _alone_awaited(proxy: RunningProxy) -> dict[str, Any] | None:
    """The update that runs, once the fleet shows that only the second worker is awaited."""
    fleet = httpx.get(f"{proxy.url}/fleet").json()
    if not any(operation["operation"] == "update" and operation["missing"] == ["w1"] for operation in fleet["operations"]):
        return None
    return httpx.get(f"{proxy.url}/fleet/updates").json()["updates"][0]


def test_a_worker_without_the_extension_says_how_to_get_it_and_goes_on(worker):
    with headrace(worker) as proxy:
        response = update(proxy, "9", "broadcast", host="127.0.0.1", port=1, number=1)
        assert response.status_code == 501
        message = response.json()["error"]["message"]
        assert "start its engine with --worker-extension-cls plugins.weights_nccl.worker.BroadcastReceiver" in message
        assert "Nothing has changed" in message
        assert proxy.states() == {"w0": "ready"}
