"""Which data-parallel rank gets a call."""

from tests.proxy import wait_for
from tests.workers import RunningWorker


class Ranks:
    """Of a worker to which nobody else speaks, one call at a time: the rank that has read a prompt, by the worker's metrics."""

    def __init__(self, worker: RunningWorker, count: int = 2) -> None:
        self._worker = worker
        self._count = count
        self._read = self._now()

    def since(self) -> int:
        """The rank of the call since the last look. Blocks until the worker has counted it; from trio, call it in a thread.

        Raises: `TimeoutError`.
        """
        [rank] = wait_for(lambda: [rank for rank, (before, now) in enumerate(zip(self._read, self._now(), strict=True)) if now > before])
        self._read = self._now()
        return rank

    def _now(self) -> list[float]:
        return [self._worker.metric("vllm:prompt_tokens_total", engine=str(rank)) for rank in range(self._count)]
