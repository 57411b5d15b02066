"""The three workers that headrace is tested against, one of each for the whole session.

`scripted_worker` and `engine_worker` are real vLLM servers. Tests that use them, directly or through `worker`, are marked `real`; they're
skipped only where a real worker can't be had at all. Where it merely isn't installed yet, the fixture installs it, or fails.

A test that changes its worker's state (pause, weights, adapters) takes back what it did: the others share it.
"""

from collections.abc import Iterator

import pytest
import structlog

from tests import workers
from tests.workers import Kind, RunningWorker

_FIXTURES: dict[Kind, str] = {"stand-in": "stand_in_worker", "scripted": "scripted_worker", "engine": "engine_worker"}
_REAL_KINDS: tuple[Kind, ...] = ("scripted", "engine")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # A mark can't be put on a fixture, so the tests that use one of these get it here.
    real = {_FIXTURES[kind] for kind in _REAL_KINDS}
    for item in items:
        parameters = item.callspec.params.values() if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ()
        named = {value for value in parameters if isinstance(value, str)}  # for `getfixturevalue`
        if real & {*getattr(item, "fixturenames", ()), *named}:
            item.add_marker(pytest.mark.real)


@pytest.fixture(autouse=True)
def loggers_without_a_cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a logger writes that an earlier test's headrace has cached can't be captured."""
    configure = structlog.configure
    monkeypatch.setattr(structlog, "configure", lambda **options: configure(**{**options, "cache_logger_on_first_use": False}))
    yield
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def stand_in_worker() -> Iterator[RunningWorker]:
    """Our own stand-in worker."""
    with workers.stand_in() as worker:
        yield worker


@pytest.fixture(scope="session")
def scripted_worker() -> Iterator[RunningWorker]:
    """The real server with a scripted engine."""
    _skip_if_impossible("scripted")
    with workers.scripted() as worker:
        yield worker


@pytest.fixture(scope="session")
def engine_worker() -> Iterator[RunningWorker]:
    """The real server with the real engine and a tiny model."""
    _skip_if_impossible("engine")
    with workers.engine() as worker:
        yield worker


@pytest.fixture(
    scope="session",
    params=[pytest.param(kind, marks=[pytest.mark.real] if kind in _REAL_KINDS else []) for kind in _FIXTURES],
)
def worker(request: pytest.FixtureRequest) -> RunningWorker:
    """Each of the three workers in turn."""
    return request.getfixturevalue(_FIXTURES[request.param])


def _skip_if_impossible(kind: Kind) -> None:
    if reason := workers.why_not(kind):
        pytest.skip(f"no {kind} worker here: {reason}")
