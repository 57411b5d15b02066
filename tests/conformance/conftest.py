"""What the three parts of the suite share."""

from collections.abc import Iterator

import pytest

from tests import workers
from tests.workers import Kind, RunningWorker
from tests.workers.components import ENGINE_VERSION, SERVER_VERSION

Version = tuple[int, ...]


def version_of(kind: Kind) -> Version:
    """The vLLM version whose behaviour a kind of worker has, as (0, 33)."""
    return tuple(map(int, (ENGINE_VERSION if kind == "engine" else SERVER_VERSION).split(".")[:2]))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "exercises(*names): rpcs and fields of proto/*.proto that the test puts on the wire")


@pytest.fixture(scope="session", params=["stand_in_worker", pytest.param("scripted_worker", marks=pytest.mark.real)])
def current_worker(request: pytest.FixtureRequest) -> RunningWorker:
    """Each of the two workers of 0.33 in turn: for what 0.31 has otherwise altogether, or the real engine has not."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def slow_worker(worker: RunningWorker) -> Iterator[RunningWorker]:
    """Each kind in turn, with 5 ms and more for each token: time enough for a test to do something in between."""
    match worker.kind:
        case "stand-in":
            with workers.stand_in(token_delay=0.005) as slow:
                yield slow
        case "scripted":
            with workers.scripted(step_seconds=0.005) as slow:
                yield slow
        case "engine":
            yield worker


@pytest.fixture(scope="session", params=["stand-in", pytest.param("scripted", marks=pytest.mark.real)])
def two_ranks(request: pytest.FixtureRequest) -> Iterator[RunningWorker]:
    """Each of the two workers of 0.33 in turn, with two data-parallel ranks of three GPUs each."""
    kind: Kind = request.param
    if reason := workers.why_not(kind):
        pytest.skip(f"no {kind} worker here: {reason}")
    run = workers.scripted if kind == "scripted" else workers.stand_in
    with run(data_parallel_size=2, world_size=3) as worker:
        yield worker


@pytest.fixture
def version(worker: RunningWorker) -> Version:
    """Of the worker that the test runs with: (0, 33), or (0, 31) for the real engine."""
    return version_of(worker.kind)
