"""What goes wrong while adapters are loaded: the client leaves, a worker dies, hangs, or comes back empty. Real servers, real sockets."""

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import workers
from tests.proxy import RunningProxy, headrace, wait_for
from tests.workers import RunningWorker
from tests.workers.processes import free_ports


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "adapter_config.json").write_text("{}")
    return str(tmp_path)


@pytest.fixture
def pair(path: str) -> Iterator[tuple[RunningProxy, RunningWorker, RunningWorker]]:
    """headrace in front of two real servers with scripted engines."""
    if reason := workers.why_not("scripted"):
        pytest.skip(f"no scripted worker here: {reason}")
    with workers.scripted() as a, workers.scripted() as b, headrace(a, b, settings=settings(path, 3)) as proxy:
        yield proxy, a, b


def settings(path: str, deadline: float) -> str:
    return f'[plugins.lora]\nallowed_paths = ["{path}"]\ndeadline = {deadline}\n[probe]\ninterval = 0.2'


def load(proxy: RunningProxy, path: str, timeout: float = 30.0) -> httpx.Response:
    return httpx.post(f"{proxy.url}/load_lora_adapter", json={"lora_name": "math", "lora_path": path}, timeout=timeout)


def holders(proxy: RunningProxy) -> list[str]:
    adapters: list[dict[str, Any]] = httpx.get(f"{proxy.url}/v1/loras").json()["loras"]
    return [worker for adapter in adapters for worker in adapter["workers"]]


def held(worker: RunningWorker) -> list[str]:
    return [card["id"] for card in httpx.get(f"{worker.http}/v1/models").json()["data"] if card["parent"]]


def generate(proxy: RunningProxy) -> httpx.Response:
    body = {"model": "math", "token_ids": [72, 105], "sampling_params": {"max_tokens": 2}}
    return httpx.post(f"{proxy.url}/inference/v1/generate", json=body, timeout=30)


@pytest.mark.real
def test_a_load_is_finished_when_its_client_has_gone(pair, path):
    proxy, _, b = pair
    b.order("script_stall", "add_lora", 1.5)
    with pytest.raises(httpx.ReadTimeout):
        load(proxy, path, timeout=0.5)
    assert holders(proxy) == []
    wait_for(lambda: holders(proxy) == ["w0", "w1"])
    assert load(proxy, path).json() == {"status": "ok"}
    assert held(b) == ["math"]  # the second one found it there


@pytest.mark.real
def test_a_request_that_is_repeated_joins_the_load_that_runs(pair, path):
    proxy, a, b = pair
    b.order("script_stall", "add_lora", 1.5)
    with pytest.raises(httpx.ReadTimeout):
        load(proxy, path, timeout=0.5)
    assert load(proxy, path).status_code == 200
    assert [held(worker) for worker in (a, b)] == [["math"], ["math"]]


@pytest.mark.real
def test_a_worker_that_hangs_fails_the_load_and_nobody_keeps_it(pair, path):
    proxy, a, b = pair
    b.order("script_stall", "add_lora", 5)
    response = load(proxy, path)
    assert response.status_code == 500
    assert "w1: no answer within 3 s" in response.json()["error"]["message"]
    assert held(a) == []
    assert generate(proxy).status_code == 404


@pytest.mark.real
def test_a_worker_that_dies_in_the_middle_costs_one_try(pair, path):
    proxy, a, b = pair
    b.order("script_stall", "add_lora", 5)
    since = len(b.engine_events())
    responses: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: responses.append(load(proxy, path)))
    thread.start()
    wait_for(lambda: any(event.get("method") == "add_lora" for event in b.engine_events()[since:]))
    b.send_signal(signal.SIGKILL)
    thread.join()
    assert responses[0].status_code in (200, 500)  # by whether headrace had noticed its end before
    wait_for(lambda: proxy.states()["w1"] == "gone")
    assert load(proxy, path).status_code == 200
    assert holders(proxy) == ["w0"]
    assert len(held(a)) == 1
    assert generate(proxy).headers["x-headrace-worker"] == "w0"


def test_a_worker_that_comes_back_empty_has_its_adapters_before_its_first_call(path):
    with ExitStack() as stack:
        first = stack.enter_context(workers.stand_in())
        grpc_port, http_port = free_ports(2)
        with workers.stand_in(grpc_port=grpc_port, http_port=http_port) as second:
            proxy = stack.enter_context(headrace(first, second, settings=settings(path, 10)))
            assert load(proxy, path).status_code == 200
            assert held(second) == ["math"]
        wait_for(lambda: holders(proxy) == ["w0"])
        with workers.stand_in(grpc_port=grpc_port, http_port=http_port) as second:
            wait_for(lambda: proxy.states()["w1"] == "ready")
            assert held(second) == ["math"]
            assert {generate(proxy).headers["x-headrace-worker"] for _ in range(4)} == {"w0", "w1"}
