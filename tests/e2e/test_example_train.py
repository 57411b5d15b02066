"""The example that trains, for a few steps over each transport, as its README has it."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import workers
from tests.e2e.conftest import Pair
from tests.proxy import RunningProxy, headrace
from tests.workers import components

pytestmark = pytest.mark.real

_PROJECT = Path(__file__).parents[2]
STEPS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("train")


@pytest.fixture(scope="module")
def proxy(two_engines: Pair, folder: Path) -> Iterator[RunningProxy]:
    with headrace(*two_engines, settings=f'[plugins.weights-filesystem]\nallowed_paths = ["{folder}"]') as proxy:
        yield proxy


@pytest.mark.parametrize("transport", ["filesystem", "broadcast", "nixl"])
def test_it_trains_with_the_weights_that_both_workers_have(proxy: RunningProxy, folder: Path, transport: str):
    log, picture = folder / f"{transport}.jsonl", folder / f"{transport}.png"
    python = components.engine_environment() / "bin" / "python"
    command = [python, "-m", "examples.train.train", "--url", proxy.url, "--model", workers.checkpoint(0), "--log", log]
    command += ["--transport", transport, "--folder", folder, "--steps", str(STEPS), "--rollouts", "16", "--tokens", "12"]
    path = os.pathsep.join([str(_PROJECT), str(components.nixl_packages())])
    variables = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "NIXL_LOG_LEVEL": "WARN", "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
    run = subprocess.run(command, env=os.environ | variables, cwd=_PROJECT, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    lines = [line for line in run.stdout.splitlines() if "reward" in line]
    assert len(lines) == STEPS
    assert all("w0 " in line and "w1 " in line for line in lines)
    steps = [json.loads(line) for line in log.read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert all(step["drift"] < 1e-3 for step in steps)  # who samples has the weights of who learns
    assert [worker["policy_version"] for worker in proxy.fleet()] == [str(STEPS)] * 2
    subprocess.run([sys.executable, "-m", "examples.train.plot", log, picture], cwd=_PROJECT, check=True)
    assert picture.read_bytes().startswith(b"\x89PNG")
