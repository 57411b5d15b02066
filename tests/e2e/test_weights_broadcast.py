"""Weights broadcast by a trainer to two real engines, over gloo: both say what the trainer's own model says."""

from collections.abc import Iterator

import pytest

from tests.e2e.conftest import Pair
from tests.e2e.trained import says, training
from tests.proxy import RunningProxy, headrace

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def proxy(two_engines: Pair) -> Iterator[RunningProxy]:
    with headrace(*two_engines) as proxy:
        yield proxy


def test_after_each_of_three_steps_both_workers_say_what_the_trainer_says(proxy, two_engines, tmp_path):
    said = []
    with training(proxy.url, "broadcast", tmp_path) as trainer:
        for version in ("1", "2", "3"):
            said.append(trainer.step(version))
            assert [says(worker) for worker in two_engines] == [said[-1]] * 2
            assert [worker["policy_version"] for worker in proxy.fleet()] == [version] * 2
    assert said[0] != said[1] != said[2]
