"""Fixtures for pytest: `pytest_plugins = ["core.testing.fixtures"]` in your `conftest.py`.

`headrace` is `in_memory`, in front of the workers `a` and `b`; `headrace_on_stand_ins` is `on_stand_ins`. What they run with is said by
overriding the fixtures whose names begin with `headrace_`, in a `conftest.py` or in the module of the tests:

    @pytest.fixture
    def headrace_plugins():
        return {"quiet-hours": QuietHours(Settings(worker="b"))}
"""

from collections.abc import AsyncGenerator, Mapping, Sequence

import pytest

from core.fleet.worker import Worker
from core.testing.recording import RecordingLane, recording_worker
from core.testing.running import RunningHeadrace, in_memory, on_stand_ins


@pytest.fixture
def headrace_plugins() -> Mapping[str, object]:
    """The plugins of `headrace`, by their names."""
    return {}


@pytest.fixture
def headrace_policies(headrace_plugins: Mapping[str, object]) -> Sequence[str]:
    """The policies of `headrace`: its plugins that choose workers, then `first`."""
    return [*(name for name, plugin in headrace_plugins.items() if hasattr(plugin, "choose_worker")), "first"]


@pytest.fixture
def headrace_workers() -> Sequence[tuple[Worker, RecordingLane]]:
    """The workers of `headrace`."""
    return [recording_worker("a"), recording_worker("b")]


@pytest.fixture
def headrace_settings() -> str:
    """The settings of both, as TOML."""
    return ""


@pytest.fixture
async def headrace(
    headrace_plugins: Mapping[str, object],
    headrace_policies: Sequence[str],
    headrace_workers: Sequence[tuple[Worker, RecordingLane]],
    headrace_settings: str,
) -> AsyncGenerator[RunningHeadrace, None]:
    """A headrace in memory."""
    async with in_memory(headrace_plugins, workers=headrace_workers, policies=headrace_policies, settings=headrace_settings) as running:
        yield running


@pytest.fixture
async def headrace_on_stand_ins(headrace_settings: str) -> AsyncGenerator[RunningHeadrace, None]:
    """A headrace in front of two stand-in processes."""
    async with on_stand_ins(settings=headrace_settings) as running:
        yield running
