"""Weights broadcast by a trainer to two real engines, over gloo: both say what the trainer's own model says."""

from collections.abc import Iterator

import pytest

from tests.e2e.conftest import Pair
from tests.e2e.trained import says, training
from tests.proxy import RunningProxy, headrace, wait_for

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


def test_weights_that_do_not_fit_are_refused_by_name_and_the_next_ones_mend_all(proxy, two_engines, tmp_path):
    with training(proxy.url, "broadcast", tmp_path) as trainer:
        trainer.begin("misshapen")
        answer = trainer.end()
        assert set(answer["workers"]) == {"w0", "w1"}
        assert proxy.states() == {"w0": "quarantined", "w1": "quarantined"}
        said = trainer.step("4")
        assert [says(worker) for worker in two_engines] == [said] * 2
        assert proxy.states() == {"w0": "ready", "w1": "ready"}


def test_a_trainer_that_dies_in_the_middle_leaves_nobody_paused_for_ever_and_the_next_one_mends_all(proxy, two_engines, tmp_path):
    with training(proxy.url, "broadcast", tmp_path) as trainer:
        trainer.step("5")
        trainer.begin("deadly")
        assert trainer.process.wait(60) == 3
    wait_for(lambda: proxy.states() == {"w0": "quarantined", "w1": "quarantined"}, 60)
    reasons = [worker["reason"] for worker in proxy.fleet()]
    assert all("The weights are a mixture now" in reason for reason in reasons)
    with training(proxy.url, "broadcast", tmp_path) as trainer:
        said = trainer.step("6")
        assert [says(worker) for worker in two_engines] == [said] * 2
    assert proxy.states() == {"w0": "ready", "w1": "ready"}
