"""A fleet of 64 workers stands still for an update, and goes on, with everybody who has waited. `pytest -s` shows how long that took.

That it takes no longer than one worker does is proved without a clock: each waits with its answer until the others have been asked, too
(`tests.workers.crowd`).
"""

import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.faults.test_updates import generate, post, succeed
from tests.proxy import RunningProxy, headrace, wait_for
from tests.workers.crowd import crowd

PROCESSES, EACH = 2, 32
CALLS = 100
SETTINGS = '[plugins.weights-filesystem]\nallowed_paths = ["/checkpoints"]\nshared_files = false'


@pytest.fixture(scope="module")
def proxy() -> Iterator[RunningProxy]:
    with crowd(PROCESSES, EACH) as workers, headrace(*workers, settings=SETTINGS, ready=False) as running:
        wait_for(lambda: set(running.states().values()) == {"ready"}, 120)
        yield running


def update(proxy: RunningProxy, version: str) -> dict:
    body = {"version": version, "transport": "filesystem", "path": f"/checkpoints/{version}", "wait": True}
    response = post(proxy, "/fleet/updates", body, timeout=120)
    assert response.status_code == 200, response.text
    return response.json()


def test_a_fleet_of_64_pauses_updates_and_resumes_and_no_call_is_left_waiting(proxy: RunningProxy):
    succeed(proxy, "/fleet/pause")
    answers: list[httpx.Response] = []
    threads = [threading.Thread(target=lambda: answers.append(generate(proxy))) for _ in range(CALLS)]
    for thread in threads:
        thread.start()
    wait_for(lambda: f"headrace_gate_waiting {CALLS}.0" in httpx.get(f"{proxy.url}/metrics").text, 60)
    begun = time.perf_counter()
    succeed(proxy, "/fleet/pause", {"mode": "keep"})
    update(proxy, "1")
    succeed(proxy, "/fleet/resume")
    seconds = time.perf_counter() - begun
    for thread in threads:
        thread.join(timeout=60)
    print(f"\n64 workers: pause, update and resume, asked for one by one, took {seconds:.2f} s")
    assert [answer.status_code for answer in answers] == [200] * CALLS
    assert set(proxy.states().values()) == {"ready"}


def test_a_fleet_of_64_is_updated_in_one_request(proxy: RunningProxy):
    for version in ("2", "3"):
        shown = update(proxy, version)
        assert len(shown["workers"]) == PROCESSES * EACH
        print(f"\n64 workers: the whole update took {shown['seconds']:.2f} s")
    assert {worker["policy_version"] for worker in proxy.fleet()} == {"3"}
    assert generate(proxy).status_code == 200
