"""Random: any worker, each as likely as the others.

What other policies have to beat; and fair enough when there are very many calls and they are alike.
"""

from collections.abc import Sequence
from random import Random

from core import Call, Choice, Worker, hookimpl


class RandomWorker:
    """Chooses by lot."""

    def __init__(self) -> None:
        self._random = Random()  # noqa: S311 - nobody gains by guessing it

    @hookimpl
    def choose_worker(self, call: Call, workers: Sequence[Worker]) -> Choice:  # noqa: ARG002 - all calls are alike
        """See `core.hookspecs`."""
        return Choice(self._random.choice(workers), "random")
