"""What the faults happen to."""

from collections.abc import Iterator

import pytest

from tests import workers
from tests.proxy import RunningProxy, headrace
from tests.workers import RunningWorker

Pair = tuple[RunningProxy, RunningWorker, RunningWorker]


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """headrace, with the `SETTINGS` of the test's module, in front of two stand-ins."""
    with workers.stand_in() as a, workers.stand_in() as b, headrace(a, b, settings=request.module.SETTINGS) as proxy:
        yield proxy, a, b


@pytest.fixture
def scripted_pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """The same in front of two real servers with scripted engines, of one rank and of three."""
    if reason := workers.why_not("scripted"):
        pytest.skip(f"no scripted worker here: {reason}")
    with workers.scripted() as a, workers.scripted(world_size=3) as b, headrace(a, b, settings=request.module.SETTINGS) as proxy:
        yield proxy, a, b


@pytest.fixture(scope="session", params=["grpc", "http"])
def scripted_proxy(scripted_worker: RunningWorker, request: pytest.FixtureRequest) -> Iterator[RunningProxy]:
    """headrace in front of the scripted worker, over each wire."""
    with headrace(scripted_worker, wires=request.param) as proxy:
        yield proxy
