"""What the end-to-end tests share."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests import workers
from tests.proxy import RunningProxy, headrace
from tests.workers import RunningWorker

Pair = tuple[RunningWorker, RunningWorker]


@pytest.fixture(scope="package")
def two_engines() -> Iterator[Pair]:
    """Two real engines with the tiny model and with every worker extension of ours, `tests.workers.receivers`.

    A test leaves them with the weights that it gave them: whoever needs others publishes them first.
    """
    if reason := workers.why_not("engine"):
        pytest.skip(f"no engine here: {reason}")
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        # Both at once: each takes half a minute and more to start.
        started = [pool.submit(stack.enter_context, workers.receiving_engine()) for _ in range(2)]
        yield started[0].result(), started[1].result()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where checkpoints may lie."""
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def reading_proxy(two_engines: Pair, folder: Path) -> Iterator[RunningProxy]:
    """headrace in front of two engines that read the checkpoints in the folder."""
    with headrace(*two_engines, settings=f'[plugins.weights-filesystem]\nallowed_paths = ["{folder}"]') as proxy:
        yield proxy


@pytest.fixture(scope="package")
def routing_worker() -> Iterator[RunningWorker]:
    """A real engine with a mixture of experts that captures what it routes."""
    if reason := workers.why_no_variants():
        pytest.skip(f"no engine that captures routing here: {reason}")
    with workers.routing_engine() as worker:
        yield worker
