"""What the faults happen to."""

from collections.abc import Iterator

import pytest

from tests.proxy import RunningProxy, headrace
from tests.workers import RunningWorker


@pytest.fixture(scope="session", params=["grpc", "http"])
def scripted_proxy(scripted_worker: RunningWorker, request: pytest.FixtureRequest) -> Iterator[RunningProxy]:
    """headrace in front of the scripted worker, over each wire."""
    with headrace(scripted_worker, wires=request.param) as proxy:
        yield proxy
