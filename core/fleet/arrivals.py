"""Workers that come, and engines that are found paused or running: what follows for their standings."""

import structlog

from core.fleet.cohort import instance_of
from core.fleet.journal import Journal
from core.fleet.standing import Standing
from core.fleet.standings import Standings, wake_up_route
from core.fleet.worker import Worker

log = structlog.stdlib.get_logger()


class Arrivals:
    """Judges each worker that comes by what this headrace, or the journal of one before it, knows of its process."""

    def __init__(self, journal: Journal, standings: Standings) -> None:
        self._journal = journal
        self._standings = standings

    def greet(self, worker: Worker) -> None:
        """A worker comes, for the first time or again."""
        instance = instance_of(worker)
        before = self._standings.known(worker)
        if before is None or before.instance != instance:
            self._standings.introduce(worker, self._begin_anew(worker, instance, before))
        standing = self._standings.of(worker)
        lateness = "" if standing.updating or standing.by_hand else self._standings.lateness(worker)
        if lateness and not standing.failed:
            self._standings.hold_out(worker, lateness)
            return
        standing.late |= bool(lateness)  # it failed before it was away: another try is worth it
        if standing.late or standing.left_frozen:
            self._standings.needy(worker)

    def found(self, worker: Worker) -> None:
        """Its engine was found paused, or running, or it is gone."""
        if worker.observed.state == "ready":
            standing = self._standings.of(worker)
            standing.inherited = standing.unclear = standing.unknown = False
            if standing.asleep:  # somebody has woken it up behind headrace's back
                self._standings.sleep(worker, False)
            self._standings.show(worker)
        elif worker.observed.state == "paused":
            if self._standings.of(worker).unclear:
                log.warning("fleet.may_sleep", worker=worker.id, end=f"POST {wake_up_route(worker)}", why="no administration.journal")
                self._standings.show(worker)
            if self._standings.of(worker).unknown:
                self._identify(worker)
        self._standings.tell()

    def _identify(self, worker: Worker) -> None:
        """It was paused when this headrace came; a new process wouldn't be, so without a name it is the one that was noted last."""
        standing = self._standings.of(worker)
        standing.session = True
        standing.torn.add("model")
        if self._journal.remembers and (noted := self._journal.last_state(worker.id)):
            standing.recall(noted)
            standing.left_frozen = worker.id in self._standings.frozen
            self._standings.show(worker)
            if standing.late or standing.is_frozen:
                self._standings.needy(worker)

    def _may_sleep(self, worker: Worker) -> bool:
        """Whether a headrace before this one may have put it to sleep (vLLM 0.33: a worker tells no sleep from a pause)."""
        return not self._journal.remembers and bool(worker.info and worker.info.supports_sleep)

    def _begin_anew(self, worker: Worker, instance: str, before: Standing | None) -> Standing:
        standing = Standing(instance)
        named = bool(worker.info and worker.info.instance_id)
        noted = self._journal.last_state(worker.id, instance if named else None)
        standing.unclear = before is None and not noted and self._may_sleep(worker)
        standing.inherited = before is None and not standing.unclear
        # Who has no name may be the process that was noted, or another one.
        standing.unknown = before is None and (not self._journal.remembers or bool(noted and not named))
        standing.left_frozen = self._standings.frozen.get(worker.id) == instance
        if noted and named:  # a headrace before this one knew it
            standing.recall(noted)
            return standing
        if before and before.updating:
            standing.failed, standing.late = "it was started anew in the middle of a weight update", True
        elif before and before.failed and (before.by_hand or self._standings.current.of(worker) is None):
            standing.failed, standing.by_hand = before.failed, before.by_hand
        elif self._standings.others_are_held(worker):
            standing.waits = True
        standing.spoiled = {"model"} if standing.failed else set()
        return standing
