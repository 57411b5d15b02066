"""A worker that answers nothing any more, though it is there: its own calls wait, those of others don't."""

import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests import workers
from tests.faults.clients import body, call, tokens_of
from tests.proxy import headrace, wait_for
from tests.workers.scripted_engine import Behaviour

#: A token every 50 ms.
SLOW = [Behaviour.SLOW, 5]
PROBES = "[probe]\ninterval = 0.1\ntimeout = 0.5\nfailures = 2\n"


@pytest.mark.parametrize("wire", ["grpc", "http"])
def test_a_hanging_worker_affects_only_its_own_calls(wire):
    with (
        workers.scripted() as first,
        workers.scripted() as second,
        headrace(first, second, wires=wire, settings=PROBES) as proxy,
        ThreadPoolExecutor(8) as pool,
    ):
        caught = pool.submit(call, proxy, body(SLOW, 10))
        wait_for(lambda: first.running_requests() == 1)
        first.send_signal(signal.SIGSTOP)
        try:
            # Some of these come before headrace has noticed, and go to the worker that hangs; the others are answered meanwhile.
            early = [pool.submit(call, proxy, body(b"Hello", 3)) for _ in range(4)]
            wait_for(lambda: proxy.states() == {"w0": "gone", "w1": "ready"})
            wait_for(lambda: sum(answer.done() for answer in early) >= 2)
            for _ in range(4):
                assert call(proxy, body(b"Hello", 3)).headers["x-headrace-worker"] == "w1"
            assert not caught.done()
        finally:
            first.send_signal(signal.SIGCONT)
        # What was caught goes on where it was.
        assert (caught.result(timeout=30).status_code, len(tokens_of(caught.result()))) == (200, 10)
        assert [answer.result(timeout=30).status_code for answer in early] == [200] * 4
        wait_for(lambda: set(proxy.states().values()) == {"ready"})


def test_a_blocked_engine_is_no_dead_one():
    """A collective operation whose peers don't come blocks an engine for minutes; its calls are worth waiting for."""
    with workers.scripted() as worker, headrace(worker, settings=PROBES) as proxy, ThreadPoolExecutor(2) as pool:
        answer = pool.submit(call, proxy, body(SLOW, 20))
        wait_for(lambda: worker.running_requests() == 1)
        worker.order("script_stall", "reset_prefix_cache", 2.0)
        blocked = pool.submit(worker.order, "reset_prefix_cache")
        wait_for(lambda: proxy.states() == {"w0": "gone"})
        assert not answer.done()
        assert len(tokens_of(answer.result(timeout=30))) == 20
        wait_for(lambda: proxy.states() == {"w0": "ready"})
        blocked.exception(timeout=30)
