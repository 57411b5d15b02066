"""Weights written by a trainer for two real engines: both say what the trainer's own model says."""

import pytest

from tests.e2e.trained import says, training

pytestmark = pytest.mark.real


def test_after_each_of_three_steps_both_workers_say_what_the_trainer_says(reading_proxy, two_engines, folder):
    said = []
    with training(reading_proxy.url, "filesystem", folder) as trainer:
        for version in ("1", "2", "3"):
            said.append(trainer.step(version))
            assert [says(worker) for worker in two_engines] == [said[-1]] * 2
            assert [worker["policy_version"] for worker in reading_proxy.fleet()] == [version] * 2
    assert said[0] != said[1] != said[2]
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["version-2", "version-3"]
