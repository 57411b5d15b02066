"""A weight update as one transaction: the gate closes, all pause, all get the weights, each is asked for its version, the gate opens.

Whatever fails, nobody stays paused but who is quarantined, or whom a trainer had paused before. A trainer that drives the steps itself
walks through `core.fleet.updating`, with the same rules.
"""

from collections.abc import Sequence
from http import HTTPStatus

import structlog
import trio
from msgspec.structs import replace

from core.errors import CallError
from core.fleet.cohort import Member, instance_of
from core.fleet.control import ControlFailed, WorkerControl
from core.fleet.joining import Joining
from core.fleet.journal import Journal
from core.fleet.operations import Answers, FleetFailed, Operation
from core.fleet.pausing import Pausing
from core.fleet.progress import Update, UpdateRequest
from core.fleet.standings import Standings
from core.fleet.updating import Updating
from core.fleet.worker import Worker
from core.hookcalls import is_end
from core.settings import AdministrationSettings

log = structlog.stdlib.get_logger()


class Transaction:
    """How an update is carried out, as an operation on its workers."""

    def __init__(
        self,
        settings: AdministrationSettings,
        standings: Standings,
        pausing: Pausing,
        joining: Joining,
        updating: Updating,
        journal: Journal,
    ) -> None:
        self._deadline = settings.deadline
        self._timeout = settings.update_timeout
        self._standings = standings
        self._pausing = pausing
        self._joining = joining
        self._updating = updating
        self._journal = journal

    def demand_closed(self, request: UpdateRequest, workers: Sequence[Worker]) -> None:
        """Raises: `CallError` (409) when the update would destroy one that a trainer takes by steps, and doesn't say that it may."""
        if not request.force:
            self._standings.demand_closed("update", workers, ', or say "force": true')

    async def run(self, update: Update, operation: Operation) -> None:
        """Pause, apply, verify, resume.

        Cancellation (headrace ends): the workers stay as they are; the journal has what a new headrace needs to know.
        Raises: `FleetFailed`, which names each worker that failed; `CallError` (409) when the trainer's group that it needs isn't there, or
        isn't whole any more, a trainer has begun an update by steps, or this one was given up before anybody was asked to take the weights:
        then whom it has paused goes on.
        """
        workers, request = update.workers, update.request
        self.demand_closed(request, workers)
        if update.transport.grouped:
            self._joining.demand_joined(operation, workers)
        update.phase = "pausing"
        pausing = trio.CancelScope()
        update.scopes.append(pausing)
        try:
            paused = await self._pausing.freeze(operation, workers, request.mode, clear_cache=request.clear_cache, scope=pausing)
        except FleetFailed as failed:
            for worker, failure in failed.failures.items():
                update.fail(worker, f"it couldn't be paused: {failure.reason}")
            raise
        if update.given_up_by or update.stopped:
            await self._pausing.start_again(operation, paused)
            update.demand_wanted()
        for worker in workers:
            update.progress[worker.id].status = "paused"
        await self._updating.abandon(operation, workers)
        before = {worker: self._standings.of(worker).snapshot() for worker in workers}
        update.told = replace(update.told, torn=frozenset(worker.id for worker in workers if "model" in before[worker].torn))
        for worker in workers:
            self._standings.begin(worker, by=update.by)
        await self._journal.flush()
        update.phase = "applying"
        attempt = _Attempt(update, self._deadline)
        applied = await operation.ask(workers, attempt.apply, deadline=self._timeout, setting="update_timeout")
        update.phase = "verifying"
        verified = await operation.ask(applied.good, attempt.verify, deadline=self._deadline)
        update.phase = "resuming"
        # Who has done nothing is as good as before, as long as nobody got the new weights.
        whole = [] if applied.good else [worker for worker in applied.refusals if worker.id not in attempt.touched]
        for worker in whole:
            self._standings.take_back(worker, before[worker], applied.refusals[worker].reason)
        await self._pausing.go_on(operation, [worker for worker in paused if worker in whole])
        await self._end(update, operation, applied, verified, whole)

    async def _end(
        self, update: Update, operation: Operation, applied: Answers[None], verified: Answers[str], whole: Sequence[Worker]
    ) -> None:
        failures = {
            worker: failure for worker in update.workers if (failure := applied.failures.get(worker) or verified.failures.get(worker))
        }
        for worker, label in verified.good.items():
            worker.policy_version = label
        broken = [worker for worker in failures if worker not in whole]
        for worker, member in zip(update.workers, update.told.cohort.members, strict=True):
            if worker in broken:
                self._quarantine(worker, member, f"update to {update.request.version!r}: {failures[worker].reason}")
        self._renew(update, operation, [*verified.good])
        self._tell(update, failures)
        await self._pausing.go_on(operation, verified.good)
        if not broken and failures:
            raise FleetFailed(operation.name, failures, "Nothing has changed")
        if failures:
            who = "Quarantined" if not whole else f"Quarantined: {', '.join(worker.id for worker in broken)}"
            others = "the other workers go on" if verified.good or whole else "no worker has the weights"
            raise FleetFailed(operation.name, failures, f"{who}; {others}{' as they were' if whole else ''}")

    def _quarantine(self, worker: Worker, member: Member, reason: str) -> None:
        standing = self._standings.of(worker)
        if standing.instance == member.instance:
            self._standings.fail(worker, reason)
        elif standing.updating:  # another process since the update was asked for; one that came later was judged when it came
            self._standings.hold_out(worker, reason)

    def _renew(self, update: Update, operation: Operation, updated: Sequence[Worker]) -> None:
        request = update.request
        if update.again is not None:
            for worker in updated:
                self._standings.mend(worker, update.again)
        elif update.transport.repeatable:
            self._standings.renew(updated, update.workers, operation.started, request.version, request.transport, request.options)
        else:
            self._standings.renew(updated, update.workers, operation.started, request.version)

    def _tell(self, update: Update, failures: dict[Worker, ControlFailed]) -> None:
        for worker in update.workers:
            if failure := failures.get(worker):
                update.fail(worker, failure.reason)
            else:
                update.progress[worker.id].status = "done"


class _Attempt:
    """One round of all members. Each method is a question to one worker."""

    def __init__(self, update: Update, deadline: float) -> None:
        self._update = update
        self._deadline = deadline
        self._members = {member.id: member for member in update.told.cohort.members}
        self._scopes: dict[str, trio.CancelScope] = {}
        #: Workers that have done something of what the transport asked for, so that nobody knows what their weights are.
        self.touched: set[str] = set()

    async def apply(self, control: WorkerControl) -> None:
        """Let the transport bring the weights. A member of a group whose other member has failed is given up after the deadline."""
        member = self._members[control.worker.id]
        progress = self._update.progress[member.id]
        progress.status, started = "applying", trio.current_time()
        scope = self._scopes[member.id] = trio.CancelScope()
        self._update.scopes.append(scope)
        try:
            with scope:
                await self._update.transport.apply(self._update.told, member, control)
        except trio.TooSlowError as error:
            cause = CallError(HTTPStatus.GATEWAY_TIMEOUT, f"the transport {self._update.transport.name!r} has lost patience")
            raise self._failed(control, cause) from error
        except CallError as error:
            raise self._failed(control, error) from error
        except BaseException as error:
            if is_end(error):
                raise
            log.exception("update.fault", **self._update.note(), worker=member.id)
            fault = CallError(500, f"a fault of the transport {self._update.transport.name!r}: {type(error).__name__}")
            raise self._failed(control, fault) from error
        finally:
            progress.seconds = round(trio.current_time() - started, 3)
            if control.answered:
                self.touched.add(member.id)
        if scope.cancelled_caught:
            self.touched.add(member.id)
            given_up = f"given up by {self._update.given_up_by}"
            why = given_up if self._update.given_up_by else f"not done {self._deadline:g} s after another worker had failed"
            raise self._failed(control, CallError(HTTPStatus.GATEWAY_TIMEOUT, why))

    async def verify(self, control: WorkerControl) -> str:
        """Drop what was made with the weights before, label the new ones, and read back whose they are."""
        version = self._update.request.version
        # Another process, which has none of these weights, must not get their label.
        if (await control.instance() or instance_of(control.worker)) != self._members[control.worker.id].instance:
            raise self._failed(control, CallError(HTTPStatus.CONFLICT, "it was replaced by another process meanwhile"))
        await control.forget_encoded_media()
        await control.set_policy_version(version)
        if (label := await control.policy_version()) != version:
            raise self._failed(control, CallError(HTTPStatus.INTERNAL_SERVER_ERROR, f"it labels its weights {label!r} afterwards"))
        return label

    def _failed(self, control: WorkerControl, cause: CallError) -> ControlFailed:
        self._update.fail(control.worker, cause.reason if isinstance(cause, ControlFailed) else cause.message)
        if not self._update.transport.repeatable:
            for scope in self._scopes.values():
                scope.deadline = min(scope.deadline, trio.current_time() + self._deadline)
        if isinstance(cause, ControlFailed):
            return cause
        return ControlFailed(control.worker.id, f"update over {self._update.transport.name}", cause)
