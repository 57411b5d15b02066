"""Weights read out of a trainer's memory by two real engines, over NIXL: both say what the trainer's own model says."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import Pair
from tests.e2e.trained import says, training
from tests.proxy import RunningProxy, headrace
from tests.workers import components

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def proxy(two_engines: Pair) -> Iterator[RunningProxy]:
    if reason := components.why_not("nixl"):
        pytest.skip(f"no NIXL here: {reason}")
    with headrace(*two_engines) as proxy:
        yield proxy


def test_after_each_of_three_steps_both_workers_say_what_the_trainer_says(proxy: RunningProxy, two_engines: Pair, tmp_path: Path):
    said = []
    with training(proxy.url, "nixl", tmp_path) as trainer:
        for version in ("1", "2", "3"):
            said.append(trainer.step(version))
            assert [says(worker) for worker in two_engines] == [said[-1]] * 2
            assert [worker["policy_version"] for worker in proxy.fleet()] == [version] * 2
    assert said[0] != said[1] != said[2]
