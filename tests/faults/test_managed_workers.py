"""Workers that headrace runs itself: their processes die, and headrace ends, by itself or by force."""

import os
import signal
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.faults.clients import call
from tests.proxy import RunningProxy, headrace, wait_for


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[RunningProxy]:
    with headrace(settings="\n".join(managed(name, tmp_path) for name in "ab")) as running:
        wait_for(lambda: running.states() == {"a": "ready", "b": "ready"}, 60)
        yield running


def managed(name: str, folder: Path) -> str:
    grpc, http = free_port(), free_port()
    command = [sys.executable, "-m", "plugins.stand_in", "--grpc-port", str(grpc), "--http-port", str(http), "--token-delay", "0.05"]
    return f"""
        [[workers]]
        id = "{name}"
        grpc = "127.0.0.1:{grpc}"
        http = "http://127.0.0.1:{http}"
        command = {command}
        output = "{folder / name}.log"
    """


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def pid_of(proxy: RunningProxy, name: str) -> int:
    return next(worker["process"]["pid"] for worker in proxy.fleet() if worker["id"] == name)


def is_there(pid: int) -> bool:
    """Whether it runs; one that nobody has reaped doesn't."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def slow(tokens: int) -> dict:
    return {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": tokens, "ignore_eos": True}}


def test_a_worker_whose_process_dies_comes_back_as_another_process(proxy):
    before = pid_of(proxy, "a")
    os.kill(before, signal.SIGKILL)
    wait_for(lambda: proxy.states()["a"] == "gone")
    wait_for(lambda: proxy.states()["a"] == "ready", 60)
    process = next(worker["process"] for worker in proxy.fleet() if worker["id"] == "a")
    assert process["pid"] != before
    assert (process["starts"], process["status"]) == (2, 128 + signal.SIGKILL)


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_a_worker_whose_keeper_is_killed_leaves_its_port_to_the_next(proxy):
    before = pid_of(proxy, "a")
    keeper = next(int(line.split()[1]) for line in Path(f"/proc/{before}/status").read_text().splitlines() if line.startswith("PPid:"))
    os.kill(keeper, signal.SIGKILL)
    wait_for(lambda: not is_there(before), 30)
    wait_for(lambda: pid_of(proxy, "a") not in {before, None} and proxy.states()["a"] == "ready", 60)
    process = next(worker["process"] for worker in proxy.fleet() if worker["id"] == "a")
    assert process["starts"] == 2, "the next one had the port at once"


def test_its_calls_are_answered_by_another_worker(proxy):
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(call, proxy, slow(40)) for _ in range(4)]
        wait_for(lambda: all(worker["in_flight"] == 2 for worker in proxy.fleet()))
        os.kill(pid_of(proxy, "a"), signal.SIGKILL)
        assert [answer.result(timeout=60).status_code for answer in answers] == [200] * 4
        assert {answer.result().headers["x-headrace-worker"] for answer in answers} == {"b"}


def test_when_headrace_ends_calls_are_finished_before_the_engines_end(proxy):
    pids = [pid_of(proxy, name) for name in "ab"]
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(call, proxy, slow(40)) for _ in range(2)]
        wait_for(lambda: proxy.in_flight() == 2)
        proxy.send_signal(signal.SIGTERM)
        assert [answer.result(timeout=60).status_code for answer in answers] == [200] * 2
    assert proxy.ended(60) == 0
    assert not any(map(is_there, pids))


def test_engines_do_not_outlive_a_headrace_that_was_killed(proxy):
    pids = [pid_of(proxy, name) for name in "ab"]
    os.kill(proxy.pid, signal.SIGKILL)
    wait_for(lambda: not any(map(is_there, pids)), 30)
