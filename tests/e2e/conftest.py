"""What the end-to-end tests share."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from tests import workers
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
