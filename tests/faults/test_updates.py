"""Pauses and weight updates of a fleet while a client hammers it, and what goes wrong in them. Real servers, real sockets."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import workers
from tests.proxy import RunningProxy, Wires, headrace, wait_for
from tests.workers import RunningWorker

SETTINGS = "[probe]\ninterval = 0.1\n"
UPDATE = {"update_info": {"names": ["w"], "dtype_names": ["float32"], "shapes": [[1]]}}
INIT = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1}


def post(proxy: RunningProxy, path: str, body: Any = None, *, timeout: float = 30.0) -> httpx.Response:
    return httpx.post(f"{proxy.url}{path}", json=body, timeout=timeout)


def get(proxy: RunningProxy, path: str) -> Any:
    return httpx.get(f"{proxy.url}{path}", timeout=30).json()


def succeed(proxy: RunningProxy, path: str, body: Any = None) -> Any:
    response = post(proxy, path, body)
    assert response.status_code == 200, response.text
    return response.json()


def init(proxy: RunningProxy) -> None:
    world_size = get(proxy, "/get_world_size")["world_size"]
    succeed(proxy, "/init_weight_transfer_engine", {"init_info": {**INIT, "world_size": 1 + world_size}})


def generate(proxy: RunningProxy) -> httpx.Response:
    return post(proxy, "/inference/v1/generate", {"token_ids": [72, 105], "sampling_params": {"max_tokens": 2}})


@contextlib.contextmanager
def hammered(proxy: RunningProxy) -> Iterator[Callable[[], int]]:
    """Calls all the time, four at once. At the end every one was answered with a 200; gives how many there were so far."""
    stop = threading.Event()
    answers: list[httpx.Response | Exception] = []

    def hammer() -> None:
        with httpx.Client(base_url=proxy.url, timeout=30) as client:
            while not stop.is_set():
                body = {"token_ids": [72, 105], "sampling_params": {"max_tokens": 2}}
                try:
                    answers.append(client.post("/inference/v1/generate", json=body))
                except httpx.HTTPError as error:
                    answers.append(error)

    threads = [threading.Thread(target=hammer) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        yield lambda: len(answers)
    finally:
        stop.set()
        for thread in threads:
            thread.join(timeout=30)
    assert not any(thread.is_alive() for thread in threads)
    assert [answer for answer in answers if not isinstance(answer, httpx.Response) or answer.status_code != 200] == []


def go_on(count: Callable[[], int]) -> None:
    """Wait until calls that came after this are answered."""
    before = count()
    wait_for(lambda: count() > before + 8)


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_a_client_that_hammers_all_along_gets_every_answer(pair, mode):
    proxy, *both = pair
    with hammered(proxy) as count:
        init(proxy)
        for version in ("1", "2"):
            go_on(count)
            assert succeed(proxy, f"/pause?mode={mode}&clear_cache=false") == {"status": "paused"}
            assert get(proxy, "/is_paused") == {"is_paused": True}
            assert proxy.states() == {"w0": "paused", "w1": "paused"}
            succeed(proxy, "/start_weight_update")
            assert proxy.states() == {"w0": "updating", "w1": "updating"}
            succeed(proxy, "/update_weights", UPDATE)
            succeed(proxy, "/finish_weight_update", {"weight_version": version})
            assert succeed(proxy, "/resume") == {"status": "resumed"}
        go_on(count)
    assert proxy.states() == {"w0": "ready", "w1": "ready"}
    assert get(proxy, "/weight_info") == {"weight_version": "2"}
    assert [httpx.get(f"{worker.http}/is_paused").json() for worker in both] == [{"is_paused": False}] * 2


def test_a_trainer_that_never_pauses_kills_no_engine(pair):
    proxy, *_ = pair
    with hammered(proxy) as count:
        init(proxy)
        for version in ("1", "2"):
            succeed(proxy, "/start_weight_update")
            succeed(proxy, "/update_weights", UPDATE)
            succeed(proxy, "/finish_weight_update", {"weight_version": version})
            go_on(count)
    assert [worker["policy_version"] for worker in proxy.fleet()] == ["2", "2"]


def test_who_fails_in_an_update_is_quarantined_until_the_next_and_the_others_go_on(pair):
    proxy, a, _ = pair
    with hammered(proxy) as count:
        init(proxy)
        succeed(proxy, "/start_weight_update")
        httpx.post(f"{a.http}/finish_weight_update").raise_for_status()  # behind headrace's back: w0 has none any more
        response = post(proxy, "/update_weights", UPDATE)
        assert response.status_code == 500
        assert "update_weights failed on w0" in response.json()["error"]["message"]
        succeed(proxy, "/finish_weight_update", {"weight_version": "1"})
        go_on(count)
        assert proxy.states() == {"w0": "quarantined", "w1": "ready"}
        assert "headrace_quarantined_workers 1.0" in httpx.get(f"{proxy.url}/metrics").text
        assert post(proxy, "/workers/w0/resume").status_code == 409
        succeed(proxy, "/start_weight_update")
        succeed(proxy, "/update_weights", UPDATE)
        succeed(proxy, "/finish_weight_update", {"weight_version": "2"})
        assert proxy.states() == {"w0": "ready", "w1": "ready"}


def test_a_worker_that_dies_in_an_update_is_named_and_the_others_go_on(pair):
    proxy, _, b = pair
    init(proxy)
    succeed(proxy, "/pause?mode=keep")
    succeed(proxy, "/start_weight_update")
    b.send_signal(signal.SIGKILL)
    wait_for(lambda: proxy.states()["w1"] == "gone")
    response = post(proxy, "/update_weights", UPDATE)
    assert response.status_code == 409
    assert "update_weights failed on w1: it is gone" in response.json()["error"]["message"]
    succeed(proxy, "/finish_weight_update", {"weight_version": "1"})
    succeed(proxy, "/resume")
    assert generate(proxy).headers["x-headrace-worker"] == "w0"
    assert "w1 is gone" in post(proxy, "/start_weight_update").json()["error"]["message"]


def test_a_trainer_that_is_silent_loses_its_pause():
    settings = f"{SETTINGS}[administration]\nlease = 1.0"
    with workers.stand_in() as worker, headrace(worker, settings=settings) as proxy:
        succeed(proxy, "/pause?mode=keep")
        assert generate(proxy).status_code == 200
        assert [event["workers"] for event in proxy.events("fleet.lease_ended")] == [["w0"]]


def test_a_pause_that_waits_for_a_long_call_ends_with_a_resume_or_the_lease():
    long = {"token_ids": [72, 105], "sampling_params": {"max_tokens": 1000}, "stream": True}
    settings = f"{SETTINGS}[administration]\nlease = 1.0"
    with workers.stand_in(token_delay=0.1) as worker, headrace(worker, settings=settings) as proxy, ThreadPoolExecutor(1) as pool:
        with httpx.stream("POST", f"{proxy.url}/inference/v1/generate", json=long, timeout=30) as call:
            lines = call.iter_lines()
            next(lines)
            pause = pool.submit(post, proxy, "/pause?mode=wait")
            wait_for(lambda: proxy.states() == {"w0": "paused"})
            succeed(proxy, "/resume")
            assert pause.result().status_code == 409
            assert proxy.states() == {"w0": "ready"}
            with pytest.raises(httpx.TimeoutException):
                post(proxy, "/pause?mode=wait", timeout=0.5)
            wait_for(lambda: proxy.events("fleet.lease_ended"))
            wait_for(lambda: proxy.states() == {"w0": "ready"})
            next(lines)
        assert generate(proxy).status_code == 200


def test_a_pause_outlasts_a_headrace_that_was_killed_by_a_lease(tmp_path: Path):
    settings = f'{SETTINGS}[administration]\nlease = 1.0\njournal = "{tmp_path}/journal.sqlite"'
    with workers.stand_in() as worker:
        with headrace(worker, settings=settings) as proxy:
            succeed(proxy, "/pause?mode=keep")
            proxy.send_signal(signal.SIGKILL)
            proxy.ended()
        with headrace(worker, settings=settings, ready=False) as proxy:
            wait_for(lambda: proxy.states() == {"w0": "ready"})
            assert [event["workers"] for event in proxy.events("fleet.lease_ended")] == [["w0"]]


def test_a_headrace_that_was_killed_in_an_update_resumes_nobody_and_the_next_update_mends_all(tmp_path: Path):
    settings = f'{SETTINGS}[administration]\njournal = "{tmp_path}/journal.sqlite"'
    with workers.stand_in() as a, workers.stand_in() as b:
        with headrace(a, b, settings=settings) as proxy:
            init(proxy)
            succeed(proxy, "/pause?mode=keep")
            succeed(proxy, "/start_weight_update")
            succeed(proxy, "/update_weights", UPDATE)
            proxy.send_signal(signal.SIGKILL)
            proxy.ended()
        with headrace(a, b, settings=settings, ready=False) as proxy:
            wait_for(lambda: proxy.states() == {"w0": "quarantined", "w1": "quarantined"})
            assert post(proxy, "/resume").status_code == 409
            succeed(proxy, "/start_weight_update")
            succeed(proxy, "/update_weights", UPDATE)
            succeed(proxy, "/finish_weight_update", {"weight_version": "1"})
            assert proxy.states() == {"w0": "paused", "w1": "paused"}  # the trainer had paused them
            succeed(proxy, "/resume")
            assert generate(proxy).status_code == 200
            whats = [entry["what"] for entry in get(proxy, "/fleet/journal")["entries"] if entry["what"] != "group"]
            assert whats[:2] == ["init_weight_transfer_engine", "pause"]
            assert whats[-1] == "resume"


@pytest.mark.parametrize(("wires", "journal"), [("both", False), ("http", True)])
def test_a_headrace_that_was_killed_in_an_update_and_comes_back_knowing_little_kills_no_engine(tmp_path: Path, wires: Wires, journal: bool):
    settings = f"{SETTINGS}[administration]\nlease = 1.0\n"
    settings += f'journal = "{tmp_path}/journal.sqlite"' if journal else ""
    with workers.stand_in(enable_sleep_mode=False) as worker:
        with headrace(worker, wires=wires, settings=settings) as proxy:
            init(proxy)
            succeed(proxy, "/pause?mode=keep")
            succeed(proxy, "/start_weight_update")
            proxy.send_signal(signal.SIGKILL)
            proxy.ended()
        with headrace(worker, wires=wires, settings=settings, ready=False) as proxy:
            wait_for(lambda: proxy.states() == {"w0": "quarantined"})
            assert httpx.get(f"{worker.http}/is_paused").json() == {"is_paused": True}
            succeed(proxy, "/start_weight_update")
            succeed(proxy, "/update_weights", UPDATE)
            succeed(proxy, "/finish_weight_update", {"weight_version": "1"})
            succeed(proxy, "/resume")
            assert generate(proxy).status_code == 200


@pytest.mark.real
def test_one_that_refuses_to_pause_leaves_nobody_paused(scripted_pair):
    proxy, a, b = scripted_pair
    b.order("script_fail", "pause_generation")
    response = post(proxy, "/pause?mode=keep")
    assert response.status_code == 500
    assert "pause failed on w1: " in response.json()["error"]["message"]
    assert proxy.states() == {"w0": "ready", "w1": "ready"}
    assert [httpx.get(f"{worker.http}/is_paused").json() for worker in (a, b)] == [{"is_paused": False}] * 2
    assert generate(proxy).status_code == 200


def calls(worker: RunningWorker, method: str) -> list[dict[str, Any]]:
    """Calls of a worker method that have reached its engine."""
    return [event for event in worker.engine_events("utility") if event["method"] == "collective_rpc" and event["args"][0] == method]


@pytest.mark.real
def test_all_join_the_trainers_group_at_once_each_at_its_place(scripted_pair):
    proxy, *both = scripted_pair
    for worker in both:
        worker.order("script_stall", "init_weight_transfer_engine", 1.5)
    thread = threading.Thread(target=init, args=(proxy,))
    thread.start()
    wait_for(lambda: all(calls(worker, "init_weight_transfer_engine") for worker in both))
    [operation] = get(proxy, "/fleet")["operations"]
    assert (operation["operation"], operation["missing"]) == ("init_weight_transfer_engine", ["w0", "w1"])
    thread.join(timeout=30)
    sent = [str(call["args"]) for worker in both for call in calls(worker, "init_weight_transfer_engine")]
    assert ["'rank_offset': 1" in sent[0], "'rank_offset': 2" in sent[1]] == [True, True]
    assert all("'world_size': 5" in one for one in sent)
    assert succeed(proxy, "/collective_rpc", {"method": "compute_weight_checksums"}) == {"results": [{"model": "initial"}] * 4}


@pytest.mark.real
def test_an_update_that_is_posted_again_joins_the_one_that_runs(scripted_pair):
    proxy, *both = scripted_pair
    init(proxy)
    succeed(proxy, "/start_weight_update")
    both[1].order("script_stall", "update_weights", 1.5)
    with pytest.raises(httpx.ReadTimeout):
        post(proxy, "/update_weights", UPDATE, timeout=0.5)
    succeed(proxy, "/update_weights", UPDATE)
    succeed(proxy, "/finish_weight_update", {"weight_version": "1"})
    assert [len(calls(worker, "update_weights")) for worker in both] == [1, 1]
    entries = get(proxy, "/fleet/journal")["entries"]
    assert [entry["detail"]["outcome"] for entry in entries if entry["what"] == "update_weights"] == ["ok"]
    assert entries[0]["by"].startswith("127.0.0.1 python-httpx/")
