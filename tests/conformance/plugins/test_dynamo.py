"""Trainers that administer Dynamo's workers, in the sequences that their versions go through, in front of real servers of 1 and 3 ranks.

Whether discovery names the fleet or each worker, a trainer does the same, and the engines get the same.
"""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import Any

import httpx
import pytest

from tests import workers
from tests.proxy import RunningProxy, headrace, wait_for
from tests.workers import RunningWorker

pytestmark = pytest.mark.real

METHODS = ["init_broadcaster", "update_weights_from_path"]
INFO = {"names": ["w"], "dtype_names": ["float32"], "shapes": [[1]]}
REQUIRED = {f"control/{name}" for name in ("pause_generation", "resume_generation", "is_paused", "get_weight_version")}
REQUIRED |= {f"update/{name}" for name in ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update")}
REQUIRED |= {"update/update_weight_version"}


class Trainer:
    """What all versions do: discover, and speak to every worker at the same time."""

    def __init__(self, proxy: RunningProxy) -> None:
        self.proxy = proxy
        self.http = httpx.Client(timeout=60, trust_env=False)
        self.rows = self.http.get(f"{proxy.url}/v1/rl/workers").raise_for_status().json()["workers"]
        self.rows.sort(key=lambda row: (row["component"], row["instance_id"]))
        sizes = [row["world_size"] for row in self.rows]
        #: Ranks before each worker's own.
        self.offsets = [0, *accumulate(sizes)][:-1]
        self.ranks = sum(sizes)

    def all(self, path: str, body: Callable[[int], Any] | Any = None, *, at: str = "admin_base_url") -> list[Any]:
        """Post to every worker; `body` may depend on its place."""

        def one(index: int) -> Any:
            sent = body(index) if callable(body) else body
            reply = self.http.post(f"{self.rows[index][at]}{path}", json=sent)
            assert reply.status_code == 200, reply.text
            told = reply.json()
            assert not isinstance(told, dict) or told.get("status") != "error", told
            return told

        with ThreadPoolExecutor(len(self.rows)) as pool:
            return list(pool.map(one, range(len(self.rows))))

    def engine(self, operation: str, body: Any = None) -> list[Any]:
        return self.all(f"/engine/{operation}", body, at="system_url")


Setup = tuple[Trainer, RunningWorker, RunningWorker]


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[RunningWorker, RunningWorker]]:
    if reason := workers.why_not("scripted"):
        pytest.skip(f"no scripted worker here: {reason}")
    with workers.scripted(extension_methods=METHODS) as one, workers.scripted(extension_methods=METHODS, world_size=3) as three:
        yield one, three


@pytest.fixture(scope="module", params=["fleet", "workers"])
def opened(both, request: pytest.FixtureRequest) -> Iterator[Setup]:
    settings = f"""
        [probe]
        interval = 0.1
        [plugins.lora]
        allowed_paths = ["/"]
        [plugins.dynamo]
        discovery = "{request.param}"
    """
    with headrace(*both, settings=settings) as proxy:
        trainer = Trainer(proxy)
        yield trainer, *both
        trainer.http.close()


@pytest.fixture
def setup(opened: Setup) -> Iterator[Setup]:
    trainer, *both = opened
    yield opened
    trainer.http.post(f"{trainer.proxy.url}/resume")
    for worker in both:
        worker.order("script_reset")


def now(both) -> list[int]:
    return [len(worker.engine_events()) for worker in both]


def calls(both, method: str, since: list[int]) -> list[list[str]]:
    """The arguments of each call of a worker's method, as they were logged."""
    return [
        [
            json.dumps(event["args"][2:])
            for event in worker.engine_events()[first:]
            if event.get("method") == "collective_rpc" and event["args"][0] == method
        ]
        for worker, first in zip(both, since, strict=True)
    ]


def poll_version(trainer: Trainer, version: str) -> None:
    wait_for(lambda: {told["weight_version"] for told in trainer.engine("control/get_weight_version")} == {version})


def test_what_trainers_look_at_first(setup):
    trainer, *_ = setup
    for row in trainer.rows:
        assert set(row["routes"]) >= REQUIRED
        assert row["model"] == "tiny"
        assert trainer.http.get(f"{row['admin_base_url']}/health").status_code == 200
        cards = trainer.http.get(f"{row['admin_base_url']}/v1/models").json()["data"]
        assert "tiny" in [card["id"] for card in cards]
    assert trainer.ranks == 4


def test_nccl_in_vllms_own_words(setup):
    trainer, *both = setup
    since = now(both)
    info = {"master_address": "t", "master_port": 1, "world_size": 1 + trainer.ranks}
    trainer.engine("update/init_weight_transfer_engine", lambda index: {"init_info": {**info, "rank_offset": 1 + trainer.offsets[index]}})
    trainer.engine("control/pause_generation", {"mode": "keep", "clear_cache": False})
    assert {told["is_paused"] for told in trainer.engine("control/is_paused")} == {True}
    trainer.engine("update/start_weight_update")
    trainer.engine("update/update_weights", {"update_info": INFO})
    trainer.engine("update/finish_weight_update", {"weight_version": None})
    trainer.engine("update/update_weight_version", {"new_version": "11"})
    poll_version(trainer, "11")
    trainer.engine("control/resume_generation")
    [first], [second] = calls(both, "init_weight_transfer_engine", since)
    assert ['"rank_offset": 1' in first, '"rank_offset": 2' in second] == [True, True]
    assert all('"world_size": 5' in sent for sent in (first, second))
    for method in ("start_weight_update", "update_weights", "finish_weight_update"):
        assert [len(sent) for sent in calls(both, method, since)] == [1, 1]
    assert trainer.proxy.states() == {"w0": "ready", "w1": "ready"}


def test_prime_rls_own_methods_by_collective_rpc(setup):
    trainer, *both = setup
    since = now(both)
    group = {"host": "t", "port": 1, "inference_world_size": trainer.ranks, "timeout": 9, "quantize_in_weight_transfer": False}
    trainer.all(
        "/collective_rpc",
        lambda index: {
            "method": "init_broadcaster",
            "kwargs": {**group, "rank_offset": trainer.offsets[index], "engine_world_size": trainer.rows[index]["world_size"]},
        },
    )
    trainer.all("/pause?mode=keep&clear_cache=false")
    results = trainer.all("/collective_rpc", {"method": "update_weights_from_path", "args": [None]})
    assert [told["results"] for told in results] == [[None] * row["world_size"] for row in trainer.rows]
    trainer.engine("update/update_weight_version", {"new_version": "12"})
    poll_version(trainer, "12")
    trainer.all("/resume")
    [first], [second] = calls(both, "init_broadcaster", since)
    assert ['"rank_offset": 0' in first, '"engine_world_size": 1' in first] == [True, True]
    assert ['"rank_offset": 1' in second, '"engine_world_size": 3' in second] == [True, True]
    assert [len(sent) for sent in calls(both, "update_weights_from_path", since)] == [1, 1]


def test_a_checkpoint_by_collective_rpc(setup):
    trainer, *both = setup
    since = now(both)
    trainer.engine("control/pause_generation", {"mode": "keep", "clear_cache": False})
    trainer.all("/collective_rpc", {"method": "reload_weights", "timeout": 60, "args": [], "kwargs": {"weights_path": "/s/step_13"}})
    trainer.engine("update/update_weight_version", {"new_version": "13"})
    poll_version(trainer, "13")
    trainer.engine("control/resume_generation")
    assert [["/s/step_13" in sent for sent in each] for each in calls(both, "reload_weights", since)] == [[True], [True]]


def test_the_routes_of_python_workers(setup):
    trainer, *both = setup
    since = now(both)
    trainer.engine("pause_generation", {"mode": "keep", "clear_cache": False})
    body = {"engine_rpc": "update_weights_from_path", "model_path": "/s/step_14", "weight_version": "14"}
    assert {told["status"] for told in trainer.engine("update_weights_from_disk", body)} == {"ok"}
    trainer.engine("resume_generation")
    assert {told["version"] for told in trainer.engine("get_weight_version")} == {"14"}
    assert [len(sent) for sent in calls(both, "update_weights_from_path", since)] == [1, 1]


def test_an_adapter(setup, tmp_path):
    trainer, *_ = setup
    (tmp_path / "adapter_config.json").write_text("{}")
    body = {"lora_name": "math", "source": {"uri": tmp_path.as_uri()}, "load_inplace": True}
    trainer.all("/pause?mode=keep&clear_cache=false")
    assert {told["status"] for told in trainer.all("/v1/loras", body, at="system_url")} == {"success"}
    frontend = trainer.http.get(f"{trainer.proxy.url}/v1/models").json()["data"]
    assert "math" in [card["id"] for card in frontend]
    trainer.all("/resume")
    [loaded] = trainer.http.get(f"{trainer.proxy.url}/v1/loras").json()["loras"]
    assert (loaded["on_workers"], loaded["workers"]) == ("math", ["w0", "w1"])
    missing = trainer.http.post(f"{trainer.proxy.url}/v1/loras", json={**body, "source": {"uri": (tmp_path / "soon").as_uri()}})
    assert (missing.status_code, missing.json()["status"]) == (404, "error"), "trainers ask again"
    assert trainer.http.post(f"{trainer.proxy.url}/engine/update/unload_lora", json={"lora_name": "math"}).json()["status"] == "success"


def test_a_worker_that_fails_fails_the_fan_out_and_is_named(setup):
    trainer, *both = setup
    both[1].order("script_fail", "pause_generation")
    replies = [trainer.http.post(f"{row['system_url']}/engine/control/pause_generation", json={"mode": "keep"}) for row in trainer.rows]
    assert [reply.status_code for reply in replies].count(500) == 1
    assert "w1: " in replies[-1].json()["message"]
