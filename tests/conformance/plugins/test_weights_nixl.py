"""The transport `nixl` through a real headrace: what reaches each engine, and what a worker without the extension is told."""

from typing import Any

import httpx
import pytest

from tests import workers
from tests.proxy import headrace
from tests.workers import RunningWorker

OFFER: dict[str, Any] = {
    "agent": "bml4bA==",
    "memory": "DRAM",
    "tensors": [["w", "bfloat16", [2, 3], 140_000_000_000_000, 0], ["scalar", "float32", [], 4096, 0]],
}


def update(url: str, **changes: Any) -> httpx.Response:
    body = {"version": "7", "transport": "nixl", "wait": True, **OFFER, **changes}
    return httpx.post(f"{url}/fleet/updates", json=body, timeout=60)


@pytest.mark.real
def test_every_rank_gets_the_offer_while_its_engine_is_paused():
    if reason := workers.why_not("scripted"):
        pytest.skip(f"no scripted worker here: {reason}")
    settings = "[plugins.weights-nixl]\nchunk_mib = 1\ntimeout = 5.0"
    method = "pull_weights_nixl"
    with (
        workers.scripted(extension_methods=[method]) as one,
        workers.scripted(extension_methods=[method], world_size=2) as other,
        headrace(one, other, settings=settings) as proxy,
    ):
        reply = update(proxy.url)
        assert reply.status_code == 200, reply.text
        assert {name: worker["status"] for name, worker in reply.json()["workers"].items()} == {"w0": "done", "w1": "done"}
        assert [worker["policy_version"] for worker in proxy.fleet()] == ["7", "7"]
        kwargs = {**OFFER, "chunk_bytes": 1 << 20, "timeout": 5.0}
        for worker in (one, other):
            asked = [event for event in worker.engine_events("utility") if not event["method"].startswith(("is_", "get_"))]
            assert [event["method"] for event in asked] == ["pause_generation", "collective_rpc", "set_weight_version", "resume_scheduler"]
            assert asked[1]["args"] == [method, None, [], kwargs]


def test_workers_without_the_extension_are_told_of_it_and_go_on(stand_in_worker: RunningWorker):
    with headrace(stand_in_worker) as proxy:
        reply = update(proxy.url)
        assert reply.status_code == 501
        assert "--worker-extension-cls plugins.weights_nixl.worker.NixlPull" in reply.json()["error"]["message"]
        assert proxy.states() == {"w0": "ready"}


def test_what_is_no_offer_is_refused_before_anybody_is_paused(stand_in_worker: RunningWorker):
    with headrace(stand_in_worker) as proxy:
        reply = update(proxy.url, memory="FILE")
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "memory")
        assert proxy.events("worker.state")[-1]["state"] == "ready"
