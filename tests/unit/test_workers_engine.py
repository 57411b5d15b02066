"""The real engine with the tiny model: deterministic, and different with other weights or an adapter."""

from typing import Any

import httpx
import pytest

from tests import workers
from tests.proxy import wait_for
from tests.workers import RunningWorker

pytestmark = pytest.mark.real

PROMPT = list(b"Hello, w!")


def generate(worker: RunningWorker, **body: Any) -> list[int]:
    sampling = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
    reply = httpx.post(f"{worker.http}/inference/v1/generate", json={"token_ids": PROMPT, "sampling_params": sampling} | body, timeout=60)
    return reply.raise_for_status().json()["choices"][0]["token_ids"]


def reload_weights(worker: RunningWorker, number: int) -> None:
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(workers.checkpoint(number))}}
    httpx.post(f"{worker.http}/collective_rpc", json=body, timeout=60).raise_for_status()


def test_the_two_checkpoints_answer_differently(engine_worker):
    first = generate(engine_worker)
    assert generate(engine_worker) == first
    assert len(set(first)) > 1
    try:
        reload_weights(engine_worker, 1)
        assert generate(engine_worker) != first
    finally:
        reload_weights(engine_worker, 0)
    assert generate(engine_worker) == first


def test_the_adapter_answers_differently(engine_worker):
    adapter = {"lora_name": "a", "lora_path": str(workers.adapter())}
    httpx.post(f"{engine_worker.http}/v1/load_lora_adapter", json=adapter, timeout=60).raise_for_status()
    try:
        assert generate(engine_worker, model="a") != generate(engine_worker)
    finally:
        httpx.post(f"{engine_worker.http}/v1/unload_lora_adapter", json=adapter, timeout=60).raise_for_status()


def test_an_idle_engine_has_no_requests(engine_worker):
    generate(engine_worker)
    wait_for(lambda: engine_worker.running_requests() == 0)  # the reply may come before the gauge is set
