"""What headrace has done to each worker, as far as it decides what may be done next; the state that it holds the worker in follows."""

from collections.abc import Iterable
from typing import Literal

import structlog
import trio

from core.fleet.cohort import Cohort, instance_of
from core.fleet.fleet import Fleet
from core.fleet.journal import Journal
from core.fleet.worker import Worker

log = structlog.stdlib.get_logger()


class Standing:
    """One worker's. All of it is of one process: another one at the same address starts anew."""

    def __init__(self, instance: str) -> None:
        self.instance = instance
        #: Who has paused it: the trainer, who resumes it, or an update that found it running and resumes it by itself.
        self.paused: Literal["", "trainer", "update"] = ""
        #: It came while the others were paused, and takes calls when they do; its engine runs.
        self.waits = False
        self.asleep = False
        #: An update was started and not finished. vLLM 0.33: a forward pass now kills the engine.
        self.updating = False
        #: That update is of the draft model's weights alone.
        self.draft = False
        #: Since the start, weights have arrived.
        self.received = False
        #: The engine may think that an update is running, whatever has become of it; it then refuses to start another.
        self.session = False
        #: Why it is quarantined: it failed an update, or somebody has said so. A complete update ends that.
        self.failed = ""
        #: Which weights have to be replaced completely before it may run again.
        self.spoiled: set[Literal["model", "draft"]] = set()
        self.draining = False
        #: What blocks its engine just now.
        self.blocked_by = ""
        #: With whom it has joined a trainer's group.
        self.group: Cohort | None = None
        #: When somebody last asked for something, on trio's clock.
        self.touched = trio.current_time()


class Standings:
    """The standings of the fleet's workers."""

    def __init__(self, fleet: Fleet, journal: Journal) -> None:
        self._fleet = fleet
        self._journal = journal
        self._of: dict[str, Standing] = {}
        #: Set, and replaced, at each change: whoever reckons with the leases looks again.
        self.changed = trio.Event()
        fleet.greet = self._greet

    def of(self, worker: Worker) -> Standing:
        """A worker's standing."""
        return self._of.setdefault(worker.id, Standing(instance_of(worker)))

    def touch(self, workers: Iterable[Worker]) -> None:
        """Somebody is there who cares for these workers: their leases begin anew."""
        for worker in workers:
            self.of(worker).touched = trio.current_time()
        self._tell()

    def fail(self, worker: Worker, reason: str) -> None:
        """Quarantine a worker: it takes no calls and is not resumed before it was updated completely, or released."""
        standing = self.of(worker)
        standing.spoiled.add("draft" if standing.updating and standing.draft else "model")
        standing.failed, standing.updating, standing.waits = reason, False, False
        log.error("fleet.quarantined", worker=worker.id, reason=reason)
        self._note(worker)
        self.show(worker)

    def begin(self, worker: Worker, *, draft: bool = False) -> None:
        """Its weights are going to be replaced, or those of its draft model."""
        standing = self.of(worker)
        standing.updating, standing.received, standing.session, standing.draft = True, False, True, draft
        self._note(worker)
        self.show(worker)

    def weights(self, worker: Worker) -> tuple[bool, bool, bool]:
        """`updating`, `received` and `session`, for `take_back`."""
        standing = self.of(worker)
        return standing.updating, standing.received, standing.session

    def rejoin(self, workers: Iterable[Worker]) -> None:
        """A quarantined worker whose trainer has resumed the others goes on with them, once it is whole."""
        sound = [worker for worker in workers if not self.of(worker).failed]
        if any(self.of(worker).paused == "trainer" for worker in sound):
            return
        for worker in workers:
            if self.of(worker).failed and self.of(worker).paused:
                self.of(worker).paused = "update"

    def take_back(self, worker: Worker, before: tuple[bool, bool, bool]) -> None:
        """Nothing has begun: `before` is `updating`, `received` and `session` as they were."""
        standing = self.of(worker)
        standing.updating, standing.received, standing.session = before
        self._note(worker)
        self.show(worker)

    def mend(self, worker: Worker) -> None:
        """The weights that were replaced are whole; it may run again unless the others were spoiled before."""
        standing = self.of(worker)
        standing.spoiled.discard("draft" if standing.draft else "model")
        standing.draft = False
        if standing.updating or standing.failed:
            standing.updating, standing.session = False, False
            standing.failed = standing.failed if standing.spoiled else ""
            self._note(worker)
        self.show(worker)

    def show(self, worker: Worker, *, running: bool = False) -> None:
        """Hold the worker in the state that follows, or release it. `running`: its engine has just been resumed."""
        standing = self.of(worker)
        if running:
            self._fleet.resumed(worker)
        if standing.failed:
            self._fleet.hold(worker, "quarantined", standing.failed)
        elif standing.updating or standing.blocked_by:
            self._fleet.hold(worker, "updating", standing.blocked_by or "a weight update is running")
        elif standing.asleep:
            self._fleet.hold(worker, "paused", "it sleeps")
        elif standing.paused:
            self._fleet.hold(worker, "paused", f"by {'a trainer' if standing.paused == 'trainer' else 'a weight update'}")
        elif standing.waits:
            self._fleet.hold(worker, "paused", "it waits for the others, which are paused")
        elif standing.draining:
            self._fleet.hold(worker, "draining", "somebody has asked for it")
        elif worker.hold:
            self._fleet.release(worker)
        self._tell()

    def _greet(self, worker: Worker) -> None:
        """A worker comes, for the first time or again."""
        instance = instance_of(worker)
        before = self._of.get(worker.id)
        if before and before.instance == instance:
            return
        standing = self._of[worker.id] = Standing(instance)
        if before and (before.failed or before.updating):
            standing.failed = before.failed or "it was started anew in the middle of a weight update"
        elif noted := self._journal.last_state(worker.id, instance):
            if noted["state"] == "quarantined":
                standing.failed = noted["reason"]
            elif noted["state"] == "updating":
                standing.failed = "headrace ended in the middle of a weight update"
            standing.session = noted["state"] != "whole"
        elif self.others_are_held(worker):
            standing.waits = True
        standing.spoiled = {"model"} if standing.failed else set()
        self.show(worker)

    def others_are_held(self, worker: Worker) -> bool:
        """Whether somebody has paused the workers of the same model, or updates them."""
        others = (w for w in self._fleet.workers.values() if w is not worker and set(w.models) & set(worker.models) and w.hold)
        return any(self.of(other).paused or self.of(other).updating for other in others)

    def _note(self, worker: Worker) -> None:
        standing = self.of(worker)
        state = "quarantined" if standing.failed else "updating" if standing.updating else "whole"
        self._journal.add("state", [worker.id], by="headrace", state=state, reason=standing.failed, instance=standing.instance)

    def _tell(self) -> None:
        self.changed.set()
        self.changed = trio.Event()
