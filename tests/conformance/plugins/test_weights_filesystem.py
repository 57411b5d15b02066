"""The transport `filesystem` through a real headrace, in front of each kind of worker: other weights, and what is refused."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import workers
from tests.proxy import RunningProxy, headrace
from tests.workers import RunningWorker

PROMPT = [72, 101, 108, 108, 111]
HEADER = b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'


@pytest.fixture(scope="module")
def folder(worker: RunningWorker, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints, `0` and `1`: for the engine real ones, of which it has the first."""
    folder = tmp_path_factory.mktemp("weights")
    for number in (0, 1):
        if worker.kind == "engine":
            shutil.copytree(workers.checkpoint(number), folder / str(number))
        else:
            (folder / str(number)).mkdir()
            (folder / str(number) / "model.safetensors").write_bytes(len(HEADER).to_bytes(8, "little") + HEADER + bytes(8))
        (folder / str(number) / "STABLE").touch()
    return folder


@pytest.fixture(scope="module")
def proxy(worker: RunningWorker, folder: Path) -> Iterator[RunningProxy]:
    settings = f'[plugins.weights-filesystem]\nallowed_paths = ["{folder}"]\nmarker_timeout = 1.0'
    label = httpx.get(f"{worker.http}/weight_info").json()["weight_version"]
    with headrace(worker, settings=settings) as proxy:
        yield proxy
    # The others share this worker.
    back = {"kwargs": {"weights_path": str(folder / "0")}} if worker.kind == "engine" else {}
    httpx.post(f"{worker.http}/collective_rpc", json={"method": "reload_weights", **back}, timeout=60).raise_for_status()
    httpx.post(f"{worker.http}/update_weight_version", json={"new_version": label}).raise_for_status()


def update(proxy: RunningProxy, version: str, path: Path | str, **more: Any) -> httpx.Response:
    body = {"version": version, "transport": "filesystem", "path": str(path), "wait": True, **more}
    return httpx.post(f"{proxy.url}/fleet/updates", json=body, timeout=60)


def tokens(proxy: RunningProxy) -> list[int]:
    sampling = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
    response = httpx.post(f"{proxy.url}/inference/v1/generate", json={"token_ids": PROMPT, "sampling_params": sampling}, timeout=60)
    return response.raise_for_status().json()["choices"][0]["token_ids"]


def test_a_worker_has_the_weights_that_it_is_given_and_their_version(proxy, worker, folder):
    said = []
    for version, number in (("a", 0), ("b", 1), ("c", 0)):
        told = update(proxy, version, folder / str(number), clear_cache=True).raise_for_status().json()
        assert (told["status"], told["workers"]["w0"]["status"]) == ("succeeded", "done")
        assert [one["policy_version"] for one in proxy.fleet()] == [version]
        assert httpx.get(f"{worker.http}/weight_info").json() == {"weight_version": version}
        said.append(tokens(proxy))
    assert said[0] == said[2]
    if worker.kind != "scripted":  # whose tokens are written down beforehand
        assert said[0] != said[1]
    assert proxy.states() == {"w0": "ready"}


def test_a_checkpoint_that_is_not_complete_changes_nothing(proxy, folder):
    before = [one["policy_version"] for one in proxy.fleet()]
    (folder / "2").mkdir(exist_ok=True)
    response = update(proxy, "d", folder / "2")
    assert response.status_code == 504
    assert "none of STABLE, .finished came into" in response.json()["error"]["message"]
    assert ([one["policy_version"] for one in proxy.fleet()], proxy.states()) == (before, {"w0": "ready"})


def test_a_path_that_is_not_allowed_is_refused(proxy):
    response = update(proxy, "e", "/etc")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "path")


def test_a_worker_without_prime_rls_extension_says_so(proxy, folder):
    response = update(proxy, "f", folder / "0", method="update_weights_from_path")
    assert response.status_code >= 400
    assert "update_weights_from_path" in response.json()["error"]["message"]
    update(proxy, "g", folder / "0").raise_for_status()
    assert proxy.states() == {"w0": "ready"}
