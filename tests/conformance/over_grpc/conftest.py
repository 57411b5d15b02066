"""Clients of the workers' gRPC, and the account of what tests put on the wire."""

from collections.abc import AsyncGenerator, Iterator

import pytest

from tests.conformance.over_grpc.client import Client, client_of
from tests.conformance.over_grpc.coverage import Seen, exercises
from tests.workers import RunningWorker

_FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    outcome = yield
    report = outcome.get_result()  # pyright: ignore[reportOptionalMemberAccess]
    if report.when == "call":
        item.stash[_FAILED] = not report.passed


@pytest.fixture
def seen(request: pytest.FixtureRequest) -> Iterator[Seen]:
    """What the test puts on the wire. On the scripted worker a test that passed is held to its `exercises`."""
    seen = Seen()
    yield seen
    claimed = {name for mark in request.node.iter_markers(exercises.name) for name in mark.args}
    if "scripted" in seen.kinds and not request.node.stash.get(_FAILED, True):
        missing = claimed - seen.names
        assert not missing, f"named by `exercises`, but never on the wire: {', '.join(sorted(missing))}"


@pytest.fixture
async def client(worker: RunningWorker, seen: Seen) -> AsyncGenerator[Client, None]:
    """A client of each worker in turn."""
    async with client_of(worker, seen) as client:
        yield client


@pytest.fixture
async def current(current_worker: RunningWorker, seen: Seen) -> AsyncGenerator[Client, None]:
    """A client of each worker of 0.33 in turn."""
    async with client_of(current_worker, seen) as client:
        yield client


@pytest.fixture
async def scripted(scripted_worker: RunningWorker, seen: Seen) -> AsyncGenerator[Client, None]:
    """A client of the scripted worker, for what only a script makes happen."""
    async with client_of(scripted_worker, seen) as client:
        yield client
