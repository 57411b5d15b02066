"""The standings of the fleet's workers, and the states that headrace holds these in, which follow."""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import quote

import structlog
import trio

from core.errors import CallError
from core.fleet.cohort import instance_of
from core.fleet.current import CurrentWeights, Weights
from core.fleet.fleet import Fleet
from core.fleet.journal import Journal
from core.fleet.standing import Snapshot, Standing
from core.fleet.trainer_updates import TrainerUpdate
from core.fleet.worker import Worker

log = structlog.stdlib.get_logger()

#: Why a worker takes no calls that was woken up without getting new weights.
DISCARDED: Final = "its weights were discarded by a sleep of level 2: update the fleet"


class Standings:
    """The standings of the fleet's workers."""

    def __init__(self, fleet: Fleet, journal: Journal, current: CurrentWeights) -> None:
        self._fleet = fleet
        self._journal = journal
        self.current = current
        #: Told of each worker that has to be brought up to date, or was left paused by a headrace that is no more.
        self.needy: Callable[[Worker], None] = lambda _: None
        #: Whom headrace itself has paused, and not resumed yet: worker to instance. An earlier headrace's are among them.
        self.frozen: dict[str, str] = {}
        for entry in journal.facts("frozen"):
            self.frozen = entry.detail["instances"]
        self._of: dict[str, Standing] = {}
        #: Set, and replaced, at each change: whoever reckons with the leases looks again.
        self.changed = trio.Event()

    def of(self, worker: Worker) -> Standing:
        """A worker's standing."""
        if (standing := self._of.get(worker.id)) is None:
            standing = self._of[worker.id] = Standing(instance_of(worker))
            standing.since = -math.inf
        return standing

    def known(self, worker: Worker) -> Standing | None:
        """That of whoever was there under its id before."""
        return self._of.get(worker.id)

    def introduce(self, worker: Worker, standing: Standing) -> None:
        """This is a worker's standing from now on: another process has come, or the first one."""
        self._of[worker.id] = standing
        self.show(worker)

    @property
    def fleet_workers(self) -> Mapping[str, Worker]:
        """All workers by id, whoever is asked for."""
        return self._fleet.workers

    def block(self, workers: Iterable[Worker], reason: str) -> None:
        """Their engines do nothing else just now, for that reason; with none, they do again."""
        for worker in workers:
            self.of(worker).blocked_by = reason
            self.show(worker)

    def opened_on(self, workers: Iterable[Worker]) -> Iterable[TrainerUpdate]:
        """The updates by steps that are open on these."""
        return dict.fromkeys(opened for worker in workers if (opened := self.of(worker).opened))

    def demand_closed(self, name: str, workers: Sequence[Worker], otherwise: str = "") -> None:
        """Raises: `CallError` (409) when a trainer has an update open on one of these, which would be destroyed."""
        for opened in self.opened_on(workers):
            ids = ", ".join(worker.id for worker in workers if self.of(worker).opened is opened)
            text = f"{name}: {opened.by} has started a weight update on {ids} {opened.started} and has not finished it"
            raise CallError(HTTPStatus.CONFLICT, f"{text}: finish it first (/finish_weight_update){otherwise}")

    def touch(self, workers: Iterable[Worker]) -> None:
        """Somebody is there who cares for these workers: their leases begin anew."""
        for worker in workers:
            self.of(worker).touched = trio.current_time()
        self.tell()

    def fail(self, worker: Worker, reason: str) -> None:
        """Quarantine a worker: it takes no calls and is not resumed before it was updated completely, or released."""
        standing = self.of(worker)
        standing.spoiled.add(standing.part if standing.updating else "model")
        standing.failed, standing.updating, standing.waits, standing.late, standing.discarded = reason, False, False, False, False
        self._leave(worker, reason)
        log.error("fleet.quarantined", worker=worker.id, reason=reason)
        self._note(worker)
        self.show(worker)

    def hold_out(self, worker: Worker, reason: str) -> None:
        """Quarantine a worker that has missed an update."""
        self.fail(worker, reason)
        self.of(worker).late = True
        self._note(worker)
        self.show(worker)
        self.needy(worker)

    def hold_out_the_late(self) -> None:
        """All those that haven't got the weights that they should have."""
        for worker in self._fleet.workers.values():
            if worker.is_there and not self.of(worker).failed and not self.of(worker).updating and (lateness := self.lateness(worker)):
                self.hold_out(worker, lateness)

    def sleep(self, worker: Worker, asleep: bool) -> None:
        """It sleeps, or is going to, or is awake again: without weights, it takes no calls."""
        standing = self.of(worker)
        standing.asleep = asleep
        if standing.discarded and not asleep and not standing.failed:
            self.fail(worker, DISCARDED)
            standing.discarded = True  # no update has left a part of itself: its engine may run
        self._note(worker)
        self.show(worker)

    def discard(self, worker: Worker) -> None:
        """Its model's weights are gone; those that an update has broken before stay broken."""
        standing = self.of(worker)
        standing.discarded |= "model" not in standing.spoiled
        standing.spoiled.add("model")
        self._note(worker)

    def doubt(self, worker: Worker) -> None:
        """Quarantine a worker that was found paused, and for which nobody comes: if its weights are half of an update, a call kills it."""
        self.of(worker).paused = "update"
        what = "it was paused when headrace came, and nobody knows whether its weights are whole"
        self.fail(worker, f"{what}: {self._help(worker)}")

    def take_out(self, worker: Worker, reason: str) -> None:
        """Quarantine a worker whatever its weights are, and whatever becomes of them, until it is released; an update goes on there."""
        standing = self.of(worker)
        standing.by_hand = standing.failed = reason
        standing.waits, standing.late = False, False
        log.error("fleet.quarantined", worker=worker.id, reason=reason)
        self._note(worker)
        self.show(worker)

    def drain(self, worker: Worker, reason: str) -> None:
        """Give it no more calls, for that reason; with none, give it calls again as far as nothing else is against that."""
        self.of(worker).draining = reason
        self._note(worker)
        self.show(worker)

    def begin(self, worker: Worker, *, by: str, draft: bool = False, opened: TrainerUpdate | None = None) -> None:
        """Its weights are going to be replaced, or those of its draft model; `opened` when by a trainer's steps. One that was open before
        is `by`'s no longer, or has become his.
        """
        standing = self.of(worker)
        if (former := standing.opened) and former is not opened:
            at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            former.taken = f"{by} has started another one ({at}), and the workers are his now" if by != former.by else ""
            self._leave(worker, f"{by} has started another one")
        if opened:
            opened.enter(worker)
        standing.opened = opened
        standing.updating, standing.received, standing.session, standing.draft = True, False, True, draft
        standing.torn.add(standing.part)
        self._note(worker)
        self.show(worker)

    def let_go_of(self, workers: Iterable[Worker]) -> None:
        """A trainer's pause ends for those, too, that aren't resumed as they are quarantined: headrace does that when they are whole."""
        for worker in workers:
            if self.of(worker).failed and self.of(worker).paused == "trainer":
                self.of(worker).paused = "update"
        self.note_frozen()

    def take_back(self, worker: Worker, before: Snapshot, reason: str) -> None:
        """Nothing has begun, for that reason."""
        standing = self.of(worker)
        if standing.opened and standing.opened is not before.opened:
            standing.opened.leave(worker, reason, unchanged=True)
        standing.updating, standing.received, standing.session, standing.draft, torn, standing.opened = before
        standing.torn = set(torn)
        if standing.opened:
            standing.opened.enter(worker)
            standing.opened.taken = ""
        self._note(worker)
        self.show(worker)

    def mend(self, worker: Worker, weights: int | None) -> None:
        """The weights that were replaced are whole: those of this number, `None` for the draft model's.

        It may run again unless the others were spoiled before.
        """
        standing = self.of(worker)
        standing.spoiled.discard(standing.part)
        standing.discarded &= "model" in standing.spoiled
        standing.torn.discard(standing.part)
        standing.session &= not standing.updating  # a checkpoint ends no update that the engine thinks is running
        standing.updating, standing.draft = False, False
        self._leave(worker)
        if weights is not None:
            standing.weights, standing.unknown = weights, False
        if standing.failed and not standing.spoiled:
            standing.failed, standing.late = standing.by_hand, False
            standing.waits = standing.paused != "trainer" and self.is_held_back(worker)
        self._note(worker)
        self.show(worker)

    def accept(self, worker: Worker) -> None:
        """Whatever its weights are, somebody answers for them; one in the middle of an update stays in it."""
        standing, current = self.of(worker), self.current.of(worker)
        standing.by_hand = standing.failed = ""
        held = self.is_held_back if standing.updating else self.others_are_held
        standing.waits = standing.paused != "trainer" and held(worker)
        if not standing.updating:
            standing.spoiled.clear()
            standing.late = standing.unknown = standing.discarded = False
            standing.weights = current.number if current else standing.weights
        self._note(worker)
        self.show(worker)

    def renew(
        self,
        updated: Sequence[Worker],
        asked: Sequence[Worker],
        since: float,
        version: str | None,
        transport: str = "",
        options: Any = None,
    ) -> None:
        """`updated` have got whole new weights; `asked` should have, since that time. `transport` brings them again, if it has a name.

        Who came since then, and so wasn't asked, is held out.
        """
        drafts = [worker for worker in updated if self.of(worker).draft]
        for worker in drafts:  # the weights that count are the model's
            self.mend(worker, None)
        updated = [worker for worker in updated if worker not in drafts]
        if not updated:
            return
        weights = Weights(self.current.next_number(), version, transport, options or {})
        for worker in updated:
            self.mend(worker, weights.number)
        excused = [worker for worker in self._fleet.workers.values() if worker.is_there and self._is_excused(worker, version, since)]
        self.current.replace(weights, updated, [*asked, *excused])
        self.hold_out_the_late()

    def note_frozen(self) -> None:
        """Let the journal know whom headrace itself has paused: it may end before it resumes them."""
        ours = [(id_, one) for id_, one in self._of.items() if one.left_frozen or (one.paused == "update" and not one.waits)]
        frozen = {id_: standing.instance for id_, standing in ours}
        frozen = {**{id_: instance for id_, instance in self.frozen.items() if id_ not in self._of}, **frozen}
        if frozen != self.frozen:
            self.frozen = frozen
            self._journal.add("frozen", list(frozen), by="headrace", of="fleet", instances=frozen)

    def show(self, worker: Worker, *, running: bool = False) -> None:
        """Hold the worker in the state that follows, or release it. `running`: its engine has just been resumed."""
        standing = self.of(worker)
        if running:
            standing.inherited = standing.unclear = standing.unknown = False
            self._fleet.resumed(worker)
        if standing.failed:
            self._fleet.hold(worker, "quarantined", standing.failed, late=standing.late)
        elif standing.updating or standing.blocked_by:
            self._fleet.hold(worker, "updating", standing.blocked_by or "a weight update is running")
        elif standing.asleep:
            self._fleet.hold(worker, "paused", "it sleeps")
        elif standing.waits and standing.paused != "trainer":
            self._fleet.hold(worker, "paused", "it waits for the others, which are paused")
        elif standing.paused:
            self._fleet.hold(worker, "paused", f"by {'a trainer' if standing.paused == 'trainer' else 'a weight update'}")
        elif standing.unclear and worker.observed.state == "paused":
            text = "it was paused or asleep before headrace was, and doesn't tell which"
            self._fleet.hold(worker, "paused", f"{text}; if its weights are whole, POST {wake_up_route(worker)} ends either")
        elif standing.draining:
            self._fleet.hold(worker, "draining", standing.draining)
        elif worker.hold:
            self._fleet.release(worker)
        self.tell()

    def is_paused(self, worker: Worker) -> bool:
        """Whether somebody has paused it, or its like, and may have forgotten that; not one that sleeps."""
        standing = self.of(worker)
        found = standing.inherited and worker.observed.state == "paused"
        return bool(standing.paused or standing.waits or found) and not standing.asleep

    def lateness(self, worker: Worker) -> str:
        """What is wrong with the weights of a worker that has missed an update; empty when it has those that it should have."""
        current = self.current.of(worker)
        if current is None or self.of(worker).weights >= current.number:
            return ""
        if current.version is None:
            what = "it came after an update without a version, so nobody can tell whether it has those weights"
        elif worker.policy_version == current.version:
            return ""
        else:
            what = f"it has the weights {worker.policy_version!r} and should have {current.version!r}"
        return f"{what}: {self._help(worker)}"

    def _help(self, worker: Worker) -> str:
        return f"update the fleet, or take it as it is (POST /fleet/workers/{worker.id}/release)"

    def _is_excused(self, worker: Worker, version: str | None, since: float) -> bool:
        """Whether a worker that has got no new weights doesn't say that the others' were only for them."""
        standing = self.of(worker)
        return bool(standing.failed) or standing.since > since or (version is not None and worker.policy_version == version)

    def others_are_held(self, worker: Worker) -> bool:
        """Whether somebody has paused the others of its cohort, or of its model, or updates them."""
        return any(
            standing.paused == "trainer" or ((standing.updating or standing.paused) and not (standing.failed or standing.waits))
            for standing in self._others(worker)
        )

    def is_held_back(self, worker: Worker) -> bool:
        """Whether a trainer has paused the others, and would find this one running."""
        return any(standing.paused == "trainer" for standing in self._others(worker))

    def _others(self, worker: Worker) -> Iterable[Standing]:
        whose = self.current.whose(worker)
        held = (other for other in self._fleet.workers.values() if other.hold and other.is_there and other is not worker)
        return (self.of(other) for other in held if self.current.whose(other) == whose)

    def let_go(self) -> None:
        """Whoever has waited for others goes on when these do."""
        for worker in self._fleet.workers.values():
            if worker.is_there and self.of(worker).waits and not self.others_are_held(worker):
                self.of(worker).waits = False
                self.show(worker)
                if self.of(worker).is_frozen:
                    self.needy(worker)

    def lose(self, worker: Worker, reason: str, started: TrainerUpdate) -> None:
        """A member of an open update was lost; another process in its place was judged when it came."""
        if self.of(worker).opened is started:
            self.hold_out(worker, reason)
        started.leave(worker, reason)

    def _leave(self, worker: Worker, reason: str = "") -> None:
        standing = self.of(worker)
        if standing.opened:
            standing.opened.leave(worker, reason)
            standing.opened = None

    def _note(self, worker: Worker) -> None:
        self._journal.add("state", [worker.id], by="headrace", **self.of(worker).note())

    def tell(self) -> None:
        """Something has changed with which the leases reckon."""
        self.changed.set()
        self.changed = trio.Event()


def wake_up_route(worker: Worker) -> str:
    """The route that wakes this worker alone up."""
    return f"/workers/{quote(worker.id, safe='')}/wake_up"
