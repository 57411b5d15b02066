"""Training with pictures: after each step the workers that see say what the trainer's own model says."""

import json
import subprocess
from pathlib import Path

import pytest

from tests import workers
from tests.proxy import headrace
from tests.workers import components
from tests.workers.modules import in_engine

pytestmark = pytest.mark.real


def test_after_each_of_three_steps_the_worker_says_to_each_picture_what_the_trainer_says(tmp_path: Path):
    if reason := workers.why_no_variants():
        pytest.skip(f"no engine with a model that sees here: {reason}")
    settings = f'[plugins.weights-filesystem]\nallowed_paths = ["{tmp_path}"]'
    with workers.seeing_engine() as worker, headrace(worker, settings=settings) as proxy:
        command = in_engine("tests.e2e.training_seeing", proxy.url, components.variant_models() / "vision", tmp_path, 3)
        run = subprocess.run(**command, capture_output=True, text=True, timeout=300, check=False)
        assert run.returncode == 0, run.stderr
        assert proxy.states() == {"w0": "ready"}
    steps = [json.loads(line) for line in run.stdout.splitlines()]
    assert [step["version"] for step in steps] == ["0", "1", "2", "3"]
    for step in steps:
        assert step["fleet"] == step["trainer"]
        assert step["drift"] < 1e-3
    assert steps[0]["fleet"][0] != steps[0]["fleet"][1]  # the pictures matter
    said = [step["trainer"] for step in steps]
    assert len({str(one) for one in said}) == len(said)  # each step changed something
