"""Round robin: the workers of a model take turns.

The simplest policy, and the fair one when calls are alike. It knows nothing of load or of caches.
"""

from collections import Counter
from collections.abc import Sequence

from core import Call, Choice, Role, Worker, hookimpl

_REASON = "round-robin"


class RoundRobin:
    """Turns are counted per model and part of a call: two models, or prefill and decode, don't disturb each other's order."""

    def __init__(self) -> None:
        self._turns: Counter[tuple[str, Role | None]] = Counter()

    @hookimpl
    def choose_worker(self, call: Call, workers: Sequence[Worker]) -> Choice:
        """See `core.hookspecs`."""
        return Choice(workers[self._turns[call.model, call.part] % len(workers)], _REASON)

    @hookimpl
    def attempt_started(self, call: Call, choice: Choice) -> None:
        """See `core.hookspecs`."""
        if choice.reason is _REASON:  # another policy's choice is nobody's turn
            self._turns[call.model, call.part] += 1
