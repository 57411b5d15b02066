"""An update that a trainer takes by steps, while it is open: who has started it, when, and on which processes."""

import time
from collections.abc import Sequence

import trio

from core.fleet.cohort import Cohort, instance_of
from core.fleet.worker import Worker


class Opened:
    """One start. Its members share it until they fail, finish, or are started on again."""

    def __init__(self, by: str, workers: Sequence[Worker]) -> None:
        self.by = by
        self._since = trio.current_time()
        self._at = time.time()
        #: Who was there at the start, whatever becomes of them: what is for each rank is cut by this.
        self.cohort = Cohort.of(workers)
        #: The process of each at the start.
        self.members = {worker: instance_of(worker) for worker in workers}

    @property
    def started(self) -> str:
        """When, in words."""
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._at))
        return f"{trio.current_time() - self._since:.0f} s ago ({at})"

    def lost(self) -> dict[Worker, str]:
        """The members that aren't there as they were, and what has become of them."""
        found: dict[Worker, str] = {}
        for worker, instance in self.members.items():
            if not worker.is_there:
                found[worker] = "it is gone, and was there when the update was started"
            elif instance_of(worker) != instance:
                found[worker] = "it was replaced by another process since the update was started"
        return found
