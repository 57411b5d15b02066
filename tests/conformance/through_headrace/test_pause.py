"""Calls that arrive while their worker is paused: held, for as long as the settings allow."""

import threading

import httpx
import pytest

from tests.conformance.through_headrace.calls import PATH, body, refusal
from tests.conformance.through_headrace.conftest import PROBES, client_of
from tests.proxy import headrace, wait_for


@pytest.fixture
def pause(worker):
    """Pauses the worker, behind headrace's back."""

    def pause(mode):
        httpx.post(f"{worker.http}/pause?mode={mode}").raise_for_status()

    yield pause
    httpx.post(f"{worker.http}/resume").raise_for_status()


def waiting(proxy):
    """Calls that wait at the gate."""
    lines = httpx.get(f"{proxy.url}/metrics").text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("headrace_gate_waiting "))


@pytest.mark.parametrize("mode", ["abort", "keep"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_to_a_paused_worker_waits_and_is_answered(client, proxy, worker, pause, mode, stream):
    pause(mode)
    wait_for(lambda: proxy.states() == {"w0": "paused"})
    answers = []
    thread = threading.Thread(target=lambda: answers.append(client.post(PATH, json=body(stream=stream))))
    thread.start()
    wait_for(lambda: waiting(proxy) == 1)
    assert not answers
    httpx.post(f"{worker.http}/resume").raise_for_status()
    thread.join(timeout=20)
    assert answers[0].status_code == 200
    wait_for(lambda: proxy.states() == {"w0": "ready"})


def test_a_pause_that_headrace_has_not_seen_yet_holds_calls_too(scripted_worker):
    with headrace(scripted_worker, settings="[probe]\ninterval = 1") as proxy, client_of(proxy) as client:
        httpx.post(f"{scripted_worker.http}/pause?mode=abort").raise_for_status()
        answers = []
        thread = threading.Thread(target=lambda: answers.append(client.post(PATH, json=body())))
        thread.start()
        try:
            wait_for(lambda: waiting(proxy) == 1)
            assert not answers
        finally:
            httpx.post(f"{scripted_worker.http}/resume").raise_for_status()
        thread.join(timeout=20)
        assert answers[0].status_code == 200


def test_who_has_waited_too_long_gets_a_503_and_when_to_try_again(worker, pause):
    with headrace(worker, settings=f"{PROBES}[gate]\ntimeout = 0.2") as proxy, client_of(proxy) as client:
        pause("keep")
        wait_for(lambda: proxy.states() == {"w0": "paused"})
        response = client.post(PATH, json=body())
        assert (response.status_code, "gate.timeout" in response.text, response.headers["retry-after"]) == (503, True, "1")


def test_who_comes_to_a_full_gate_gets_a_503(worker, pause):
    with headrace(worker, settings=f"{PROBES}[gate]\nmax_waiting = 1") as proxy, client_of(proxy) as client:
        pause("keep")
        wait_for(lambda: proxy.states() == {"w0": "paused"})
        thread = threading.Thread(target=lambda: httpx.post(f"{proxy.url}{PATH}", json=body(), timeout=60))
        thread.start()
        wait_for(lambda: waiting(proxy) == 1)
        status, error = refusal(client, body())
        assert (status, "gate.max_waiting" in error["message"]) == (503, True)
        httpx.post(f"{worker.http}/resume").raise_for_status()
        thread.join(timeout=20)
