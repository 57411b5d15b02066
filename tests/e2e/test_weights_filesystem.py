"""Weights written by a trainer for two real engines: both say what the trainer's own model says."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import Pair
from tests.e2e.trained import says, training
from tests.proxy import RunningProxy, headrace

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where checkpoints may lie."""
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def proxy(two_engines: Pair, folder: Path) -> Iterator[RunningProxy]:
    with headrace(*two_engines, settings=f'[plugins.weights-filesystem]\nallowed_paths = ["{folder}"]') as proxy:
        yield proxy


def test_after_each_of_three_steps_both_workers_say_what_the_trainer_says(proxy, two_engines, folder):
    said = []
    with training(proxy.url, "filesystem", folder) as trainer:
        for version in ("1", "2", "3"):
            said.append(trainer.step(version))
            assert [says(worker) for worker in two_engines] == [said[-1]] * 2
            assert [worker["policy_version"] for worker in proxy.fleet()] == [version] * 2
    assert said[0] != said[1] != said[2]
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["version-2", "version-3"]
