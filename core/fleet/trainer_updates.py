"""Weight updates that a trainer carries out itself, by steps or by a method of the workers: whose they are, and how they end.

They are shown beside those that headrace drives (`GET /fleet/updates`), counted as they are, and lie in the journal as they do.
"""

import secrets
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any, Final

import structlog
import trio
from msgspec.structs import asdict

from core.errors import CallError
from core.fleet.cohort import Cohort, instance_of
from core.fleet.journal import Journal
from core.fleet.progress import KEPT, Progress
from core.fleet.worker import Worker

log = structlog.stdlib.get_logger()

#: The `transport` of an update by `/start_weight_update` and the steps after it; that of one by a method is the method's name.
STEPS: Final = "steps"


class TrainerUpdate:
    """One of them. Its members share it until they fail, have their weights, or are started on again."""

    def __init__(self, transport: str, by: str, workers: Sequence[Worker], version: str | None = None) -> None:
        self.id = secrets.token_hex(4)
        self.transport = transport
        self.by = by
        self.version = version
        #: Who was there at the start, whatever becomes of them: what is for each rank is cut by this.
        self.cohort = Cohort.of(workers)
        #: The process of each that is in it still, at its start.
        self.members: dict[Worker, str] = {}
        self.progress: dict[str, Progress] = {}
        #: Who or what has put an end to it, when that wasn't its trainer; its trainer has to start anew then.
        self.taken: str = ""
        self.done = False
        self.began = trio.current_time()
        self._at = time.time()
        self._seconds = 0.0

    @property
    def started(self) -> str:
        """When, in words."""
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._at))
        return f"{trio.current_time() - self.began:.0f} s ago ({at})"

    @property
    def seconds(self) -> float:
        """From its start to its end."""
        return self._seconds if self.done else round(trio.current_time() - self.began, 3)

    @property
    def error(self) -> str | None:
        """Why it failed, or is going to; `None` when there is no reason to."""
        failed = [f"{id_}: {one.reason}" for id_, one in self.progress.items() if one.status in ("failed", "unchanged")]
        return "; ".join(failed) or None

    def enter(self, worker: Worker) -> None:
        """The worker's weights are going to be replaced by this."""
        self.members[worker] = instance_of(worker)
        self.progress[worker.id] = Progress("applying")

    def leave(self, worker: Worker, reason: str = "", *, unchanged: bool = False) -> None:
        """It has got its weights; with a reason, it hasn't, and with `unchanged` as well, it has those that it had."""
        if self.members.pop(worker, None) is not None:
            status = "unchanged" if unchanged else "failed" if reason else "done"
            self.progress[worker.id] = Progress(status, reason, self.seconds)

    def lost(self) -> dict[Worker, str]:
        """The members that aren't there as they were, and what has become of them."""
        found: dict[Worker, str] = {}
        for worker, instance in self.members.items():
            if not worker.is_there:
                found[worker] = "it is gone, and was there when the update was started"
            elif instance_of(worker) != instance:
                found[worker] = "it was replaced by another process since the update was started"
        return found

    def end(self) -> None:
        """Nothing more becomes of it."""
        for worker, reason in {**dict.fromkeys(self.members, "nobody knows"), **self.lost()}.items():
            self.leave(worker, reason)
        self._seconds, self.done = self.seconds, True

    def note(self) -> dict[str, Any]:
        """What the journal says of it, beside its outcome."""
        return {"id": self.id, "version": self.version, "transport": self.transport}

    def describe(self) -> dict[str, Any]:
        """`GET /fleet/updates/<id>`."""
        return {
            **self.note(),
            "status": "running" if not self.done else "failed" if self.error else "succeeded",
            "error": self.error,
            "phase": "done" if self.done else "applying",
            "workers": self.describe_workers(),
            "seconds": self.seconds,
            "by": self.by,
        }

    def describe_workers(self) -> dict[str, Any]:
        """What has become of each worker."""
        return {id_: asdict(progress) for id_, progress in self.progress.items()}


class TrainerUpdates:
    """Those that are open, and the latest that have ended."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._updates: dict[str, TrainerUpdate] = {}
        #: Told of each that has ended.
        self.ended: Callable[[TrainerUpdate], None] = lambda _: None

    @property
    def latest(self) -> Sequence[TrainerUpdate]:
        """In the order in which they were started."""
        return list(self._updates.values())

    def get(self, id_: str) -> TrainerUpdate | None:
        """The one of that id."""
        return self._updates.get(id_)

    def begin(self, transport: str, workers: Sequence[Worker], *, by: str, version: str | None = None) -> TrainerUpdate:
        """A trainer replaces the weights of these workers."""
        update = TrainerUpdate(transport, by, workers, version)
        for worker in workers:
            update.enter(worker)
        self._updates[update.id] = update
        ended = [id_ for id_, one in self._updates.items() if one.done]
        for id_ in ended[:-KEPT]:
            del self._updates[id_]
        self._journal.add("update_asked", [*update.progress], by=by, **update.note())
        log.info("update.asked", **update.note(), workers=[*update.progress], by=by)
        return update

    def demand_own(self, name: str, by: str) -> None:
        """Raises: `CallError` (409) when the latest update that this client has begun was ended by somebody else."""
        latest = next((update for update in reversed(self._updates.values()) if update.by == by), None)
        if latest and latest.taken:
            text = f"{name}: your weight update of {latest.started} has ended: {latest.taken}. Start anew (/start_weight_update)"
            raise CallError(HTTPStatus.CONFLICT, text)

    def conclude(self, workers: Sequence[Worker]) -> None:
        """An operation on these has ended: so has an update that none of them, and no other worker that is there, is in any more."""
        asked = {worker.id for worker in workers}
        for update in self.latest:
            if update.done or asked.isdisjoint(update.progress) or any(worker.is_there for worker in update.members):
                continue
            update.end()
            outcome, progress = update.error or "ok", update.describe_workers()
            self._journal.add(
                "update", [*progress], by=update.by, **update.note(), progress=progress, outcome=outcome, seconds=update.seconds
            )
            log.info("update.ended", **update.note(), outcome=outcome, seconds=update.seconds)
            self.ended(update)
