"""One weight update that headrace drives: what was asked for, how far it has come, and how it ended."""

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final, Literal

import trio
from msgspec import Struct
from msgspec.structs import asdict, replace

from core.errors import CallError, NoWorker
from core.fleet.cohort import Cohort
from core.fleet.control import PauseMode
from core.fleet.transport import WeightTransport, WeightUpdate
from core.fleet.worker import Worker

#: Updates that have ended and are shown still.
KEPT: Final = 100
#: In their order; calls wait at the gate from `pausing` to `resuming`.
Phase = Literal["preparing", "pausing", "applying", "verifying", "resuming", "done"]


class UpdateRequest(Struct, frozen=True):
    """What somebody asks for. `options` are the transport's own keys, as they came."""

    version: str
    transport: str
    options: Mapping[str, Any]
    #: What becomes of calls in flight.
    mode: PauseMode = "keep"
    clear_cache: bool = False
    #: The workers have to be those that they were when it was asked for.
    pinned: bool = False
    #: An update that a trainer has started by steps, and not finished, may be destroyed.
    force: bool = False


class Progress(Struct):
    """How far one worker has come; `seconds` is how long its weights took.

    `unchanged`: the update ended before the worker was to get the weights, by no fault of its own.
    """

    status: Literal["waiting", "paused", "applying", "done", "failed", "unchanged"] = "waiting"
    reason: str = ""
    seconds: float | None = None


class Update:
    """An update that runs, waits for its turn, or has ended."""

    def __init__(
        self,
        id_: str,
        request: UpdateRequest,
        transport: WeightTransport,
        options: Any,
        workers: Sequence[Worker],
        by: str,
        again: int | None,
    ) -> None:
        self.request = request
        self.transport = transport
        self.workers = tuple(workers)
        self.by = by
        #: The number of these weights, when it brings to some what others have already.
        self.again = again
        #: What the transport is told.
        self.told: WeightUpdate = WeightUpdate(id_, request.version, options, Cohort.of(workers))
        self.phase: Phase = "preparing"
        #: Somebody has given it up.
        self.given_up_by = ""
        #: Headrace ends before anybody was asked to take the weights.
        self.stopped = False
        #: What ends then.
        self.scopes: list[trio.CancelScope] = []
        #: The update that has begun before it though it was asked for later.
        self.overtaken_by: Update | None = None
        #: Its operation runs, or waits for its turn: from here on nothing that was asked for earlier may follow it.
        self.begun = False
        self.progress = {worker.id: Progress() for worker in workers}
        #: Why it failed, as whoever asked for it is told.
        self.failure: CallError | None = None
        self.done = trio.Event()
        self.began = trio.current_time()
        self._ended: float | None = None

    @property
    def id(self) -> str:
        """Its id."""
        return self.told.id

    @property
    def seconds(self) -> float:
        """From when it was asked for to its end."""
        return round((self._ended or trio.current_time()) - self.began, 3)

    def demand_cohort(self) -> None:
        """Go on with those that are there, if the transport can do without the others.

        Raises: `CallError` (409), which names who has changed; `NoWorker`.
        """
        changes = self.told.cohort.changes({worker.id: worker for worker in self.workers})
        if not changes:
            return
        if self.request.pinned or not self.transport.repeatable:
            raise CallError(HTTPStatus.CONFLICT, f"update: the cohort has changed: {'; '.join(changes)}. Ask again")
        for worker in self.workers:
            if not worker.is_there:
                self.fail(worker, "it is gone; when it comes back it is held out until it has the weights")
        self.workers = tuple(worker for worker in self.workers if worker.is_there)
        if not self.workers:
            raise NoWorker("update: no worker is there any more")
        self.told = replace(self.told, cohort=Cohort.of(self.workers))

    def overtake(self, later: "Update") -> None:
        """End it while it prepares: nothing is to follow `later`."""
        self.overtaken_by = later
        for scope in self.scopes:
            scope.cancel()

    def stop(self) -> None:
        """Headrace ends: so does this, unless workers are in the middle of getting their weights."""
        if self.phase in ("preparing", "pausing"):
            self.stopped = True
            for scope in self.scopes:
                scope.cancel()

    def give_up(self, by: str) -> None:
        """End it where it can be ended: before workers get their weights, or while they do, and are broken then."""
        self.given_up_by = by
        for scope in self.scopes:
            scope.cancel()

    def demand_wanted(self) -> None:
        """Raises: `CallError` (409) when it was overtaken or given up; `NoWorker` when headrace ends."""
        if later := self.overtaken_by:
            text = f"update: overtaken by that to version {later.request.version!r} ({later.id}), asked for later"
            raise CallError(HTTPStatus.CONFLICT, text)
        if self.given_up_by:
            raise CallError(HTTPStatus.CONFLICT, f"update: given up by {self.given_up_by}")
        if self.stopped:
            raise NoWorker("update: headrace ends; nobody got the weights")

    def note(self) -> dict[str, Any]:
        """What the journal says of it, beside the operation's outcome."""
        return {"id": self.id, "version": self.request.version, "transport": self.request.transport}

    def fail(self, worker: Worker, reason: str) -> None:
        """The worker hasn't got the weights."""
        self.progress[worker.id].status, self.progress[worker.id].reason = "failed", reason

    def conclude(self) -> None:
        """Nothing more becomes of its workers."""
        early = self.phase in ("preparing", "pausing")
        for progress in self.progress.values():
            if progress.status not in ("done", "failed"):
                progress.status = "unchanged" if early else "failed"
                progress.reason = "the update ended before it got the weights"

    def end(self, failure: CallError | None) -> None:
        """Tell whoever waits."""
        self.conclude()
        self.failure, self.phase = failure, "done"
        self._ended = trio.current_time()
        self.done.set()

    def describe(self) -> dict[str, Any]:
        """`GET /fleet/updates/<id>`."""
        status = "running" if not self.done.is_set() else "failed" if self.failure else "succeeded"
        return {
            **self.note(),
            "status": status,
            "error": self.failure.message if self.failure else None,
            "phase": self.phase,
            "workers": self.describe_workers(),
            "seconds": self.seconds,
            "by": self.by,
        }

    def describe_workers(self) -> dict[str, Any]:
        """How far each worker is."""
        return {id_: asdict(progress) for id_, progress in self.progress.items()}
