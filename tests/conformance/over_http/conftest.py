"""HTTP clients of vllm-rs 0.33.0 with a scripted engine, whose answers are the measure, and of the workers that are measured."""

from collections.abc import Iterator

import httpx
import pytest

from tests.conformance.conftest import Version, version_of
from tests.workers import RunningWorker


def _client(worker: RunningWorker) -> httpx.Client:
    return httpx.Client(base_url=worker.http, timeout=30, trust_env=False)


@pytest.fixture
def measure(scripted_worker: RunningWorker) -> Iterator[httpx.Client]:
    """The real 0.33."""
    with _client(scripted_worker) as client:
        yield client


@pytest.fixture(params=["stand_in_worker", "engine_worker"])
def other_worker(request: pytest.FixtureRequest) -> RunningWorker:
    """The stand-in, then the real engine at 0.31."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def other(other_worker: RunningWorker) -> Iterator[httpx.Client]:
    with _client(other_worker) as client:
        yield client


@pytest.fixture
def version(other_worker: RunningWorker) -> Version:
    """Of the worker that is measured."""
    return version_of(other_worker.kind)
