"""Round robin: the workers of a model take turns.

The simplest policy, and the fair one when calls are alike. It knows nothing of load or of caches.
"""

from collections import Counter
from collections.abc import Sequence

from core import Call, Choice, Worker, hookimpl


class RoundRobin:
    """Turns are counted per model, so that two models in a fleet don't disturb each other's order."""

    def __init__(self) -> None:
        self._turns: Counter[str] = Counter()

    @hookimpl
    def choose_worker(self, call: Call, workers: Sequence[Worker]) -> Choice:
        """See `core.hookspecs`."""
        turn = self._turns[call.model]
        self._turns[call.model] = turn + 1
        return Choice(workers[turn % len(workers)], "round-robin")
