"""Updates in one request (`POST /fleet/updates`) while clients call all along, and what goes wrong in them. Real servers, real sockets."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import workers
from tests.faults.clients import body, call
from tests.faults.conftest import Pair
from tests.faults.oracle import INIT, UPDATE, by_path, by_steps, first_token, tokens_by_version, watched
from tests.faults.test_updates import calls, generate, get, go_on, hammered, post, succeed
from tests.proxy import RunningProxy, headrace, wait_for
from tests.workers import RunningWorker
from tests.workers.processes import free_ports
from tests.workers.scripted_engine import Behaviour

#: headrace doesn't look for the files: the workers of these tests read none.
SETTINGS = """
[probe]
interval = 0.1
[plugins.weights-filesystem]
allowed_paths = ["/checkpoints"]
shared_files = false
"""


def asked(version: str, **more: Any) -> dict[str, Any]:
    return {"version": version, "transport": "filesystem", "path": f"/checkpoints/{version}"} | more


def update(proxy: RunningProxy, version: str, **more: Any) -> httpx.Response:
    return post(proxy, "/fleet/updates", asked(version, wait=True, **more), timeout=60)


def ended(proxy: RunningProxy, id_: str) -> dict[str, Any]:
    """The update of this id, once it has ended."""

    def look() -> dict[str, Any] | None:
        shown = get(proxy, f"/fleet/updates/{id_}")
        return None if shown["status"] == "running" else shown

    return wait_for(look, 30)


def are_paused(*both: RunningWorker) -> list[bool]:
    return [httpx.get(f"{worker.http}/is_paused").json()["is_paused"] for worker in both]


def in_one_request(proxy: RunningProxy, mode: str, version: str) -> None:
    assert update(proxy, version, mode=mode).status_code == 200


def in_steps(proxy: RunningProxy, mode: str, version: str) -> None:
    succeed(proxy, f"/pause?mode={mode}&clear_cache=false")
    by_steps(partial(succeed, proxy), version)
    succeed(proxy, "/resume")


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
@pytest.mark.parametrize(("how", "bring"), [(in_one_request, by_path), (in_steps, by_steps)])
def test_nobody_gets_a_token_of_older_weights_than_it_was_told_of(
    pair: Pair, how: Callable[..., None], bring: Callable[..., None], mode: str
):
    proxy, *both = pair
    tokens = tokens_by_version(bring, 4)
    succeed(proxy, "/init_weight_transfer_engine", {"init_info": {**INIT, "world_size": 3}})
    with watched(proxy, tokens) as watch:
        for version in list(tokens)[1:]:
            watch.go_on()
            how(proxy, mode, version)
            watch.version = version
        watch.go_on()
    assert [first_token(worker.http) for worker in both] == [[tokens[watch.version]]] * 2
    assert proxy.states() == {"w0": "ready", "w1": "ready"}
    assert are_paused(*both) == [False, False]


def test_a_client_that_dies_while_it_waits_leaves_the_update_running(pair: Pair):
    proxy, *both = pair
    with httpx.Client(base_url=proxy.url) as client, pytest.raises(httpx.ReadTimeout):
        client.post("/fleet/updates", json=asked("7", wait=True), timeout=0.001)
    [shown] = wait_for(lambda: get(proxy, "/fleet/updates")["updates"])
    assert ended(proxy, shown["id"])["status"] == "succeeded"
    assert [worker["policy_version"] for worker in proxy.fleet()] == ["7", "7"]
    assert are_paused(*both) == [False, False]


def test_a_trainer_that_dies_in_its_steps_leaves_what_the_next_update_mends():
    settings = f"{SETTINGS}[administration]\nlease = 1.0"
    with workers.stand_in() as a, workers.stand_in() as b, headrace(a, b, settings=settings) as proxy:
        succeed(proxy, "/init_weight_transfer_engine", {"init_info": {**INIT, "world_size": 3}})
        succeed(proxy, "/start_weight_update")
        succeed(proxy, "/update_weights", UPDATE)
        wait_for(lambda: proxy.states() == {"w0": "quarantined", "w1": "quarantined"})
        assert update(proxy, "8").status_code == 200
        assert proxy.states() == {"w0": "ready", "w1": "ready"}
        assert are_paused(a, b) == [False, False]


def test_a_trainer_that_dies_before_it_resumes_leaves_a_fleet_that_goes_on_with_the_new_weights():
    settings = f"{SETTINGS}[administration]\nlease = 1.0"
    with workers.stand_in() as a, workers.stand_in() as b, headrace(a, b, settings=settings) as proxy:
        succeed(proxy, "/init_weight_transfer_engine", {"init_info": {**INIT, "world_size": 3}})
        succeed(proxy, "/pause?mode=keep")
        by_steps(partial(succeed, proxy), "7")
        assert generate(proxy).status_code == 200
        assert proxy.states() == {"w0": "ready", "w1": "ready"}
        assert [worker["policy_version"] for worker in proxy.fleet()] == ["7", "7"]


def test_a_worker_that_comes_after_an_update_has_the_weights_before_it_gets_a_call(tmp_path: Path):
    grpc, http = free_ports(2)
    settings = f'{SETTINGS}[administration]\njournal = "{tmp_path}/journal.sqlite"'
    with workers.stand_in() as a:
        with workers.stand_in(grpc_port=grpc, http_port=http) as b, headrace(a, b, settings=settings) as proxy:
            assert update(proxy, "7").status_code == 200
        # Both have ended: the new headrace knows the weights, and the new process has those that it has started with.
        with headrace(a, b, settings=settings, ready=False) as proxy:
            wait_for(lambda: proxy.states() == {"w0": "ready", "w1": "starting"})
            with workers.stand_in(grpc_port=grpc, http_port=http) as b:
                wait_for(lambda: proxy.states() == {"w0": "ready", "w1": "ready"})
                assert first_token(b.http) == first_token(a.http)
                assert [worker["policy_version"] for worker in proxy.fleet()] == ["7", "7"]
                states = [event["state"] for event in proxy.events("worker.state") if event["worker"] == "w1"]
                assert next(state for state in states if state != "starting") == "quarantined"


def test_nobody_gets_a_token_of_a_new_process_before_that_has_the_weights():
    grpc, http = free_ports(2)
    tokens = tokens_by_version(by_path, 1)
    version = list(tokens)[1]
    with (
        workers.stand_in() as a,
        workers.stand_in(grpc_port=grpc, http_port=http) as b,
        headrace(a, b, settings=SETTINGS) as proxy,
        watched(proxy, tokens) as watch,
    ):
        in_one_request(proxy, "keep", version)
        watch.version = version
        watch.go_on()
        os.kill(b.pids[0], signal.SIGKILL)
        wait_for(lambda: proxy.states()["w1"] == "gone")
        with workers.stand_in(grpc_port=grpc, http_port=http) as again:
            wait_for(lambda: proxy.states()["w1"] == "ready", 30)
            watch.go_on()
            assert first_token(again.http) == [tokens[version]]


def test_a_cohort_is_updated_alone_and_refuses_to_be_once_it_has_lost_a_member():
    grpc, http = free_ports(2)
    with workers.stand_in() as a, workers.stand_in(grpc_port=grpc, http_port=http) as b, headrace(a, b, settings=SETTINGS) as proxy:
        succeed(proxy, "/fleet/cohorts", {"name": "left", "workers": ["w1"]})
        assert update(proxy, "7", cohort="left").status_code == 200
        assert [worker["policy_version"] for worker in proxy.fleet()] == ["default", "7"]
        assert get(proxy, "/cohorts/left/weight_info") == {"weight_version": "7"}
        os.kill(b.pids[0], signal.SIGKILL)
        wait_for(lambda: proxy.states()["w1"] == "gone")
        refused = update(proxy, "8", cohort="left")
        assert (refused.status_code, "w1 is gone" in refused.json()["error"]["message"]) == (409, True)
        with workers.stand_in(grpc_port=grpc, http_port=http):
            wait_for(lambda: proxy.states()["w1"] == "ready", 30)  # it has version 7 again, all the same
            refused = update(proxy, "8", cohort="left")
            assert (refused.status_code, "w1 was replaced by another process" in refused.json()["error"]["message"]) == (409, True)
            succeed(proxy, "/fleet/cohorts", {"name": "left", "workers": ["w1"]})
            assert update(proxy, "8", cohort="left").status_code == 200
        assert generate(proxy).status_code == 200


def test_the_terminal_shows_an_update_and_its_end(pair: Pair):
    proxy, *_ = pair
    command = [sys.executable, "-m", "core.cli", "update", "--version", "7", "--transport", "filesystem", "--watch"]
    environment = os.environ | {"HEADRACE_URL": proxy.url}

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *options], check=False, env=environment, capture_output=True, text=True, timeout=60)

    good = run("-o", "path=/checkpoints/7")
    assert (good.returncode, good.stderr) == (0, "")
    assert "w0: done in" in good.stdout
    bad = run("-o", "path=/elsewhere/7")
    assert (bad.returncode, "is not under" in bad.stderr) == (1, True)
    assert proxy.states() == {"w0": "ready", "w1": "ready"}


def test_an_update_that_only_prepares_holds_up_no_end(tmp_path: Path):
    settings = f'[probe]\ninterval = 0.1\n[plugins.weights-filesystem]\nallowed_paths = ["{tmp_path}"]\n'
    with workers.stand_in() as worker, headrace(worker, settings=settings) as proxy, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(update, proxy, "7", path=f"{tmp_path}/7")
        wait_for(lambda: get(proxy, "/fleet/updates")["updates"])
        began = time.monotonic()
        proxy.send_signal(signal.SIGTERM)
        assert (answer.result().status_code, answer.result().json()["error"]["message"]) == (
            503,
            "update: headrace ends; nobody got the weights",
        )
        assert proxy.ended() == 0
        assert time.monotonic() - began < 10  # and not the 30 seconds of shutdown_timeout
        assert are_paused(worker) == [False]


@pytest.mark.real
def test_an_end_while_workers_pause_leaves_nobody_paused(scripted_pair: Pair):
    proxy, *both = scripted_pair
    with ThreadPoolExecutor(2) as pool:
        long = pool.submit(call, proxy, body([Behaviour.SLOW, 5], 100))
        wait_for(lambda: proxy.in_flight() == 1)
        answer = pool.submit(update, proxy, "7", mode="wait")
        wait_for(lambda: [one["phase"] for one in get(proxy, "/fleet/updates")["updates"]] == ["pausing"])
        proxy.send_signal(signal.SIGTERM)
        assert answer.result().status_code == 503
        assert long.result().status_code == 200
        assert proxy.ended() == 0
    assert are_paused(*both) == [False, False]
    assert [calls(worker, "reload_weights") for worker in both] == [[], []]


@pytest.mark.real
def test_an_end_in_the_middle_of_an_update_is_told_to_whoever_waits_and_runs_nobody_on_half_of_the_weights():
    if reason := workers.why_not("scripted"):
        pytest.skip(f"no scripted worker here: {reason}")
    settings = f"{SETTINGS}[server]\nshutdown_timeout = 0.5\n"
    with workers.scripted() as worker, headrace(worker, settings=settings) as proxy, ThreadPoolExecutor(1) as pool:
        worker.order("script_stall", "reload_weights", 4.0)
        answer = pool.submit(update, proxy, "7")
        wait_for(lambda: calls(worker, "reload_weights"))
        proxy.send_signal(signal.SIGTERM)
        assert answer.result().status_code == 503
        assert "headrace ends; nobody knows how far the workers came" in answer.result().json()["error"]["message"]
        assert proxy.ended() == 0
        assert are_paused(worker) == [True]


@pytest.mark.real
def test_one_that_refuses_to_pause_leaves_nobody_paused_and_nobody_updated(scripted_pair: Pair):
    proxy, *both = scripted_pair
    both[1].order("script_fail", "pause_generation")
    with hammered(proxy) as count:
        response = update(proxy, "7")
        go_on(count)
    assert "update failed on w1: " in response.json()["error"]["message"]
    assert proxy.states() == {"w0": "ready", "w1": "ready"}
    assert are_paused(*both) == [False, False]
    assert [calls(worker, "reload_weights") for worker in both] == [[], []]


@pytest.mark.real
def test_one_that_is_given_up_while_a_long_call_is_waited_for_leaves_nobody_paused_and_nobody_updated(scripted_pair: Pair):
    proxy, *both = scripted_pair
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(call, proxy, body([Behaviour.SLOW, 5], 100))
        wait_for(lambda: proxy.in_flight() == 1)
        id_ = post(proxy, "/fleet/updates", asked("7", mode="wait")).json()["id"]
        wait_for(lambda: get(proxy, f"/fleet/updates/{id_}")["phase"] == "pausing")
        httpx.delete(f"{proxy.url}/fleet/updates/{id_}").raise_for_status()
        shown = ended(proxy, id_)
        assert not long.done()
        assert (shown["status"], shown["error"].startswith("update: given up by 127.0.0.1")) == ("failed", True)
        assert proxy.states() == {"w0": "ready", "w1": "ready"}
        assert generate(proxy).status_code == 200
        assert long.result().status_code == 200
    assert are_paused(*both) == [False, False]
    assert [calls(worker, "reload_weights") for worker in both] == [[], []]


@pytest.mark.real
def test_who_fails_is_quarantined_and_the_others_go_on_until_the_next_update_mends_it(scripted_pair: Pair):
    proxy, _, b = scripted_pair
    b.order("script_fail", "reload_weights")
    with hammered(proxy) as count:
        response = update(proxy, "7")
        assert response.status_code == 500
        assert "update failed on w1: " in response.json()["error"]["message"]
        assert proxy.states() == {"w0": "ready", "w1": "quarantined"}
        assert generate(proxy).headers["x-headrace-worker"] == "w0"
        go_on(count)
        assert update(proxy, "8").status_code == 200
        go_on(count)
    assert proxy.states() == {"w0": "ready", "w1": "ready"}


@pytest.mark.real
def test_who_dies_in_an_update_is_named_and_the_others_go_on(scripted_pair: Pair):
    proxy, a, b = scripted_pair
    b.order("script_stall", "reload_weights", 20.0)
    with hammered(proxy) as count:
        id_ = post(proxy, "/fleet/updates", asked("7")).json()["id"]
        wait_for(lambda: calls(b, "reload_weights"))
        for pid in b.pids:
            os.kill(pid, signal.SIGKILL)
        shown = ended(proxy, id_)
        go_on(count)
    assert (shown["status"], shown["workers"]["w0"]["status"], shown["workers"]["w1"]["status"]) == ("failed", "done", "failed")
    assert "w1" in shown["error"]
    assert generate(proxy).headers["x-headrace-worker"] == "w0"
    assert are_paused(a) == [False]


@pytest.mark.real
def test_what_is_posted_twice_is_done_once(scripted_pair: Pair):
    proxy, *both = scripted_pair
    both[1].order("script_stall", "reload_weights", 1.0)
    with hammered(proxy):
        ids = [post(proxy, "/fleet/updates", asked("7")).json()["id"] for _ in range(2)]
        assert ids[0] == ids[1]
        assert ended(proxy, ids[0])["status"] == "succeeded"
    assert [len(calls(worker, "reload_weights")) for worker in both] == [1, 1]


@pytest.mark.real
def test_all_get_their_weights_at_the_same_time(scripted_pair: Pair):
    proxy, *both = scripted_pair
    for worker in both:
        worker.order("script_stall", "reload_weights", 1.5)
    id_ = post(proxy, "/fleet/updates", asked("7")).json()["id"]
    wait_for(lambda: all(calls(worker, "reload_weights") for worker in both))
    shown = get(proxy, f"/fleet/updates/{id_}")
    assert [worker["status"] for worker in shown["workers"].values()] == ["applying", "applying"]
    assert ended(proxy, id_)["status"] == "succeeded"


@pytest.mark.real
def test_a_headrace_that_is_killed_in_an_update_is_followed_by_one_that_brings_all_back(tmp_path: Path):
    if reason := workers.why_not("scripted"):
        pytest.skip(f"no scripted worker here: {reason}")
    settings = f'{SETTINGS}[administration]\njournal = "{tmp_path}/journal.sqlite"'
    with workers.scripted() as a, workers.scripted() as b:
        with headrace(a, b, settings=settings) as proxy:
            assert update(proxy, "7").status_code == 200
            before = [first_token(worker.http) for worker in (a, b)]
            b.order("script_stall", "reload_weights", 1.0)
            post(proxy, "/fleet/updates", asked("8"))
            wait_for(lambda: len(calls(b, "reload_weights")) == 2)
            proxy.send_signal(signal.SIGKILL)
            proxy.ended()
        with headrace(a, b, settings=settings, ready=False) as proxy:
            wait_for(lambda: proxy.states() == {"w0": "ready", "w1": "ready"}, 30)
            assert [first_token(worker.http) for worker in (a, b)] == before
            assert are_paused(a, b) == [False, False]
            assert update(proxy, "8").status_code == 200
            assert [worker["policy_version"] for worker in proxy.fleet()] == ["8", "8"]


@pytest.mark.real
def test_a_worker_that_comes_in_the_middle_of_an_update_gets_no_call_before_it_has_the_weights(tmp_path: Path):
    if reason := workers.why_not("scripted"):
        pytest.skip(f"no scripted worker here: {reason}")
    grpc, http = free_ports(2)
    with workers.scripted() as a:
        with workers.stand_in(grpc_port=grpc, http_port=http) as b:
            pass
        with headrace(a, b, settings=SETTINGS, ready=False) as proxy:
            wait_for(lambda: proxy.states()["w0"] == "ready")
            a.order("script_stall", "reload_weights", 4.0)
            id_ = post(proxy, "/fleet/updates", asked("7")).json()["id"]
            wait_for(lambda: calls(a, "reload_weights"))
            with workers.stand_in(grpc_port=grpc, http_port=http) as b:
                wait_for(lambda: proxy.states()["w1"] == "paused")
                answers: list[httpx.Response] = []
                thread = threading.Thread(target=lambda: answers.append(generate(proxy)))
                thread.start()
                assert ended(proxy, id_)["status"] == "succeeded"
                wait_for(lambda: proxy.states() == {"w0": "ready", "w1": "ready"})
                thread.join(timeout=30)
                assert [answer.status_code for answer in answers] == [200]
                assert [worker["policy_version"] for worker in proxy.fleet()] == ["7", "7"]
                assert json.loads(httpx.get(f"{b.http}/weight_info").text) == {"weight_version": "7"}
