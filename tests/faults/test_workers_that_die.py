"""A worker that is killed under its calls, and one that comes back."""

import json
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx
import pytest

from tests import workers
from tests.faults.clients import PATH, body, call, tokens_of
from tests.proxy import headrace, wait_for
from tests.workers.processes import free_ports
from tests.workers.scripted_engine import Behaviour

#: A token every 100 ms.
SLOW = [Behaviour.SLOW, 10]
PROBES = "[probe]\ninterval = 0.1\ntimeout = 1\n"


@pytest.fixture
def pair():
    """Two scripted workers, to be broken."""
    with workers.scripted() as first, workers.scripted() as second:
        yield first, second


@pytest.fixture(params=["grpc", "http"])
def proxy(pair, request):
    with headrace(*pair, wires=request.param, settings=PROBES) as proxy:
        yield proxy


def busy(pair):
    """The worker that has a request, and the other one."""
    first, second = pair
    wait_for(lambda: first.running_requests() + second.running_requests() == 1)
    return (first, second) if first.running_requests() else (second, first)


def test_a_unary_call_is_done_again_by_another_worker(pair, proxy):
    sent = body(SLOW, 8)
    expected = tokens_of(httpx.post(f"{pair[0].http}{PATH}", json=sent, timeout=30))
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(call, proxy, sent | {"request_id": "again"})
        dying, other = busy(pair)
        dying.send_signal(signal.SIGKILL)
        response = answer.result(timeout=30)
    assert (response.status_code, tokens_of(response)) == (200, expected)
    assert len(other.engine_events("add")) + len(dying.engine_events("add")) == 3
    assert sorted(proxy.states().values()) == ["gone", "ready"]
    assert proxy.in_flight() == 0


def test_a_stream_without_a_token_yet_is_done_again_by_another_worker(pair):
    first, second = pair
    sent = body(b"Hello", 5, stream=True)
    expected = tokens_of(httpx.post(f"{second.http}{PATH}", json=sent, timeout=30))
    # The first worker is frozen behind headrace's back, which looks too rarely to notice.
    with headrace(first, second, settings="[probe]\ninterval = 60\n") as proxy, ThreadPoolExecutor(1) as pool:
        httpx.post(f"{first.http}/pause?mode=keep").raise_for_status()
        answer = pool.submit(call, proxy, sent)
        wait_for(lambda: first.engine_events("add"))
        first.send_signal(signal.SIGKILL)
        response = answer.result(timeout=30)
    assert (response.status_code, tokens_of(response)) == (200, expected)
    assert response.headers["x-headrace-worker"] == "w1"


def test_a_stream_that_has_begun_ends_with_an_error_event(pair, proxy):
    with httpx.stream("POST", f"{proxy.url}{PATH}", json=body(SLOW, 50, stream=True), timeout=30) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: {")
        dying, other = busy(pair)
        dying.send_signal(signal.SIGKILL)
        *_, error, done = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert done == "[DONE]"
    assert (json.loads(error)["error"]["code"], json.loads(error)["error"]["type"]) == (503, "ServiceUnavailableError")
    assert other.engine_events("add") == []
    wait_for(lambda: proxy.in_flight() == 0)


def test_without_another_worker_the_call_is_a_503():
    with workers.scripted() as worker, headrace(worker, settings=PROBES) as proxy, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(call, proxy, body(SLOW, 50))
        wait_for(lambda: worker.running_requests() == 1)
        worker.send_signal(signal.SIGKILL)
        response = answer.result(timeout=30)
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert response.json()["error"]["type"] == "ServiceUnavailableError"


def test_an_engine_that_is_killed_behind_its_server_loses_its_calls_to_another(pair):
    """The server notices nothing: its health stays SERVING, and the call would hang for ever."""
    with headrace(*pair, settings=PROBES) as proxy, ThreadPoolExecutor(1) as pool:
        sent = body(SLOW, 8)
        answer = pool.submit(call, proxy, sent)
        dying, _ = busy(pair)
        dying.send_signal(signal.SIGKILL, process=1)
        response = answer.result(timeout=60)
        assert (response.status_code, len(tokens_of(response))) == (200, 8)
        assert sorted(proxy.states().values()) == ["gone", "ready"]


def test_a_worker_that_comes_back_on_its_ports_takes_calls_again():
    grpc_port, http_port = free_ports(2)
    with ExitStack() as stack:
        first = stack.enter_context(workers.stand_in(grpc_port=grpc_port, http_port=http_port))
        proxy = stack.enter_context(headrace(first, settings=PROBES))
        expected = tokens_of(call(proxy, body(b"Hello", 5)))
        for _ in range(2):
            first.send_signal(signal.SIGKILL)
            wait_for(lambda: proxy.states() == {"w0": "gone"})
            assert call(proxy, body(b"Hello", 5)).status_code == 503
            first = stack.enter_context(workers.stand_in(grpc_port=grpc_port, http_port=http_port))
            wait_for(lambda: proxy.states() == {"w0": "ready"})
            assert tokens_of(call(proxy, body(b"Hello", 5))) == expected
