"""SIGTERM with calls under way, on real workers: they are finished; a second signal ends them, and the engine is free."""

import json
import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.faults.clients import PATH, body, call, tokens_of
from tests.proxy import headrace, wait_for
from tests.workers.scripted_engine import Behaviour

#: A token every 50 ms.
SLOW = [Behaviour.SLOW, 5]
ENDS = "headrace is shutting down"


@pytest.mark.parametrize("wire", ["grpc", "http"])
def test_calls_in_flight_are_finished_after_sigterm(scripted_worker, wire):
    with headrace(scripted_worker, wires=wire) as proxy, ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(call, proxy, body(SLOW, 20, stream=stream)) for stream in (False, True)]
        wait_for(lambda: proxy.in_flight() == 2)
        proxy.send_signal(signal.SIGTERM)
        for answer in answers:
            assert (answer.result(timeout=30).status_code, len(tokens_of(answer.result()))) == (200, 20)
        assert proxy.ended() == 0


def test_nobody_is_served_after_sigterm(scripted_worker):
    with headrace(scripted_worker) as proxy, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(call, proxy, body(SLOW, 20))
        wait_for(lambda: proxy.in_flight() == 1)
        proxy.send_signal(signal.SIGTERM)
        wait_for(lambda: _refuses(proxy))
        assert answer.result(timeout=30).status_code == 200
        assert proxy.ended() == 0


def test_a_second_signal_ends_at_once(scripted_worker):
    with headrace(scripted_worker) as proxy, ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(call, proxy, body([Behaviour.SILENT], 5, stream=stream)) for stream in (False, True)]
        wait_for(lambda: scripted_worker.running_requests() == 2)
        proxy.send_signal(signal.SIGTERM)
        wait_for(lambda: _refuses(proxy))
        assert scripted_worker.running_requests() == 2
        proxy.send_signal(signal.SIGTERM)
        assert proxy.ended() == 0
        wait_for(lambda: scripted_worker.running_requests() == 0)
        for answer in answers:
            reply = answer.result(timeout=30)
            assert (reply.status_code, reply.headers["retry-after"], reply.json()["error"]["message"]) == (503, "1", ENDS)
        assert "Traceback" not in proxy.log.read_text()


def test_calls_that_take_too_long_are_ended_at_the_limit_and_told_so(scripted_worker):
    with headrace(scripted_worker, settings="[server]\nshutdown_timeout = 0.5\n") as proxy, ThreadPoolExecutor(2) as pool:
        silent = pool.submit(call, proxy, body([Behaviour.SILENT], 5))
        slow = pool.submit(call, proxy, body(SLOW, 1000, stream=True))
        wait_for(lambda: scripted_worker.running_requests() == 2)
        proxy.send_signal(signal.SIGTERM)
        assert proxy.ended() == 0
        wait_for(lambda: scripted_worker.running_requests() == 0)
        assert (silent.result().status_code, silent.result().json()["error"]["message"]) == (503, ENDS)
        *_, error, done, end = slow.result().text.split("\n\n")
        assert (json.loads(error.removeprefix("data: "))["error"]["code"], done, end) == (503, "data: [DONE]", "")
        assert [proxy.settled(answer.result().headers["x-request-id"])["outcome"] for answer in (silent, slow)] == ["cancelled"] * 2


def test_a_killed_headrace_leaves_nothing_in_the_engine(scripted_worker):
    with headrace(scripted_worker) as proxy, ThreadPoolExecutor(2) as pool:
        for stream in (False, True):
            pool.submit(call, proxy, body([Behaviour.SILENT], 5, stream=stream))
        wait_for(lambda: scripted_worker.running_requests() == 2)
        proxy.send_signal(signal.SIGKILL)
        wait_for(lambda: scripted_worker.running_requests() == 0)


def _refuses(proxy):
    try:
        httpx.get(f"{proxy.url}{PATH}", timeout=5, trust_env=False)
    except httpx.ConnectError:
        return True
    return False
