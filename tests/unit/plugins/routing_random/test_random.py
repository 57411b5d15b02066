"""Random: any worker, each as likely as the others."""

from collections import Counter

from plugins.routing_random import RandomWorker
from tests.unit.core.rig import make_call, make_worker

WORKERS = tuple(make_worker(name) for name in "abcd")


def test_every_worker_gets_its_share():
    policy = RandomWorker()
    counts = Counter(policy.choose_worker(make_call(), WORKERS).worker.id for _ in range(4000))
    assert all(800 < counts[name] < 1200 for name in "abcd")  # more than seven standard deviations


def test_the_reason_is_its_name():
    assert RandomWorker().choose_worker(make_call(), WORKERS).reason == "random"
