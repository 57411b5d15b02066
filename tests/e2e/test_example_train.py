"""The example that trains, for a few steps over each transport, as its README has it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import workers
from tests.proxy import RunningProxy
from tests.workers.modules import in_engine

pytestmark = pytest.mark.real

_PROJECT = Path(__file__).parents[2]
STEPS = 3


@pytest.mark.parametrize("transport", ["filesystem", "broadcast", "nixl"])
def test_it_trains_with_the_weights_that_both_workers_have(reading_proxy: RunningProxy, folder: Path, transport: str):
    log, picture = folder / f"{transport}.jsonl", folder / f"{transport}.png"
    options = ["--url", reading_proxy.url, "--model", workers.checkpoint(0), "--log", log, "--transport", transport, "--folder", folder]
    options += ["--steps", STEPS, "--rollouts", 16, "--tokens", 12]
    command = in_engine("examples.train.train", *options, nixl=True)
    run = subprocess.run(**command, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    lines = [line for line in run.stdout.splitlines() if "reward" in line]
    assert len(lines) == STEPS
    assert all("w0 " in line and "w1 " in line for line in lines)
    steps = [json.loads(line) for line in log.read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert all(step["drift"] < 1e-3 for step in steps)  # who samples has the weights of who learns
    assert [worker["policy_version"] for worker in reading_proxy.fleet()] == [str(STEPS)] * 2
    subprocess.run([sys.executable, "-m", "examples.train.plot", log, picture], cwd=_PROJECT, check=True)
    assert picture.read_bytes().startswith(b"\x89PNG")
