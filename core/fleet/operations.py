"""Operations on workers: asked of all at once, finished whoever has gone, one at a time on each worker, joined when they are the same."""

import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from hashlib import blake2b
from http import HTTPStatus
from typing import Any, Generic, TypeVar, cast

import msgspec
import structlog
import trio

from core.beside import beside
from core.errors import CallError, NoWorker
from core.fleet.control import ControlFailed, WorkerControl
from core.fleet.journal import Journal
from core.fleet.worker import Worker
from core.hookcalls import is_end
from core.settings import AdministrationSettings

log = structlog.stdlib.get_logger()
T = TypeVar("T")


class FleetFailed(CallError):
    """An operation failed on some workers. The text names each with its error, and says what has become of the others.

    The status is that of the workers when they agree, and 500 otherwise.
    """

    def __init__(self, operation: str, failures: "Mapping[Worker, ControlFailed]", otherwise: str = "") -> None:
        self.failures = failures
        statuses = {failure.status for failure in failures.values()}
        reasons = told(failures)
        super().__init__(statuses.pop() if len(statuses) == 1 else 500, f"{operation} failed on {reasons}. {otherwise}".strip())


class Answers(Generic[T]):
    """What came of asking several workers: the answers and the failures, each in the order of the workers."""

    def __init__(self, workers: Sequence[Worker], answers: Mapping[Worker, T], failures: Mapping[Worker, ControlFailed]) -> None:
        self.good = {worker: answers[worker] for worker in workers if worker in answers}
        self.failures = {worker: failures[worker] for worker in workers if worker in failures}

    @property
    def refusals(self) -> "dict[Worker, ControlFailed]":
        """The failures of those who say that the request is the reason."""
        return {worker: failure for worker, failure in self.failures.items() if failure.status in _REFUSALS}

    @property
    def refused(self) -> bool:
        """Nobody did it, and everybody says that the request is the reason: nothing has changed anywhere."""
        return not self.good and len(self.refusals) == len(self.failures)

    def demand_all(self, operation: str, others: str) -> None:
        """`others` says what has become of those that haven't failed, if there are any. Raises: `FleetFailed`."""
        if self.failures:
            raise FleetFailed(operation, self.failures, others if self.good else "")


def told(failures: "Mapping[Worker, ControlFailed]") -> str:
    """Each worker with its error."""
    return "; ".join(f"{worker.id}: {failure.reason}" for worker, failure in failures.items())


def in_rank_order(answers: Answers[list[Any]]) -> list[Any]:
    """What the ranks have answered, in their order."""
    return [result for results in answers.good.values() for result in results]


def digest(value: Any) -> str:
    """Equal for equal requests."""
    return blake2b(msgspec.json.encode(value, order="deterministic"), digest_size=16).hexdigest()


_REFUSALS = frozenset({HTTPStatus.BAD_REQUEST, HTTPStatus.NOT_FOUND, HTTPStatus.NOT_IMPLEMENTED})


class Operation:
    """One operation that runs, or waits for its turn."""

    def __init__(self, name: str, workers: Sequence[Worker], by: str, note: Mapping[str, Any] | None = None) -> None:
        self.name = name
        self.workers = tuple(workers)
        self.by = by
        #: What the journal says of it, beside the outcome.
        self.note = note or {}
        self.started = trio.current_time()
        #: Workers that were asked and have not answered; `None` while it waits for its turn.
        self.missing: list[str] | None = None
        #: Clients that wait for its end.
        self.awaited = 0
        self._given_up_by = ""
        self._scopes: list[trio.CancelScope] = []

    @property
    def seconds(self) -> float:
        """Since it was asked for."""
        return round(trio.current_time() - self.started, 3)

    def describe(self) -> dict[str, Any]:
        """Its entry in `GET /fleet`."""
        workers = [worker.id for worker in self.workers]
        missing = None if self.missing is None else list(self.missing)
        return {"operation": self.name, "workers": workers, "by": self.by, "seconds": self.seconds, "missing": missing}

    def give_up(self, by: str) -> None:
        """Whoever has been asked, and has not answered, has failed."""
        self._given_up_by = by
        for scope in self._scopes:
            scope.cancel()

    async def ask(
        self,
        workers: Iterable[Worker],
        question: Callable[[WorkerControl], Awaitable[T]],
        *,
        deadline: float | None,
        setting: str = "deadline",
    ) -> Answers[T]:
        """Ask these workers, all at once. `deadline` is in seconds, and that of the `setting`; a worker that lets it pass has failed, and
        may do it all the same.

        Cancellation: those that were asked may have done it.
        """
        asked = list(workers)
        answers: dict[Worker, T] = {}
        failures: dict[Worker, ControlFailed] = {}
        self.missing = missing = [worker.id for worker in asked]
        self._scopes = []

        async def ask_one(worker: Worker) -> None:
            scope = trio.CancelScope()
            self._scopes.append(scope)
            try:
                with scope, trio.fail_after(math.inf if deadline is None else deadline):
                    answers[worker] = await question(WorkerControl(worker))
                if scope.cancelled_caught:
                    cause = CallError(HTTPStatus.GATEWAY_TIMEOUT, f"given up by {self._given_up_by}")
                    failures[worker] = ControlFailed(worker.id, self.name, cause)
            except ControlFailed as failure:
                failures[worker] = failure
            except trio.TooSlowError:
                cause = CallError(HTTPStatus.GATEWAY_TIMEOUT, f"no answer within {deadline:g} s (administration.{setting})")
                failures[worker] = ControlFailed(worker.id, self.name, cause)
            except BaseException as error:
                if is_end(error):
                    raise
                # A fault of ours with one worker must not break off what the others are in the middle of.
                log.exception("fleet.fault", operation=self.name, worker=worker.id)
                failures[worker] = ControlFailed(worker.id, self.name, CallError(500, f"a fault of headrace: {type(error).__name__}"))
            missing.remove(worker.id)

        async with trio.open_nursery() as nursery:
            for worker in asked:
                nursery.start_soon(ask_one, worker)
        for worker, failure in failures.items():
            log.warning("fleet.failed", operation=self.name, worker=worker.id, reason=failure.reason)
        return Answers(asked, answers, failures)


class _Pending:
    """An operation and its end, for whoever waits for it."""

    def __init__(self, operation: Operation) -> None:
        self.operation = operation
        self.done = trio.Event()
        self.result: Any = None
        self.failure: Exception | None = None


class Operations:
    """Runs operations in a nursery of its own, for as long as `run` does."""

    def __init__(self, settings: AdministrationSettings, journal: Journal) -> None:
        self._settings = settings
        self._journal = journal
        self.running: list[Operation] = []
        #: Told of each operation that has ended.
        self.ended: Callable[[Operation], None] = lambda _: None
        #: Told of each that nobody waits for any more, before it has ended.
        self.left: Callable[[Operation], None] = lambda _: None
        self._pending: dict[tuple[str, tuple[str, ...], str], _Pending] = {}
        self._locks: dict[str, trio.Lock] = {}
        self._send, self._receive = trio.open_memory_channel[Callable[[], Awaitable[None]]](math.inf)

    async def run(self) -> None:
        """Run what is asked for. Cancellation ends it, and every operation where it stands."""
        async with trio.open_nursery() as nursery:
            async for operation in self._receive:
                nursery.start_soon(operation)

    async def do(
        self,
        name: str,
        workers: Sequence[Worker],
        work: Callable[[Operation], Awaitable[T]],
        *,
        by: str,
        same: str = "",
        note: Mapping[str, Any] | None = None,
    ) -> T:
        """Do `work`, alone on these workers, and give its result; the journal has `note` beside the outcome.

        Who asks for the same while it runs or waits, by the name, the workers and `same`, waits for that one: trainers post again when
        they lose patience. Unless something else has been asked for since: then it comes after that.

        Cancellation: the work goes on alone.
        Raises: what it raises; `NoWorker` when headrace ends meanwhile.
        """
        key = (name, tuple(worker.id for worker in workers), same)
        pending = self._pending.get(key)
        if pending is None or not self._is_last(pending.operation):
            operation = Operation(name, workers, by, note)
            pending = self._pending[key] = _Pending(operation)
            self.running.append(operation)

            async def run() -> None:
                pending.failure = NoWorker(f"{name}: headrace ends; nobody knows how far the workers came")
                try:
                    pending.result = await self._alone(operation, work)
                except Exception as error:  # noqa: BLE001 - raised again by whoever waits
                    pending.failure = error
                else:
                    pending.failure = None
                finally:
                    if self._pending[key] is pending:
                        del self._pending[key]
                    pending.done.set()

            self._send.send_nowait(run)
        pending.operation.awaited += 1
        try:
            await pending.done.wait()
        finally:
            pending.operation.awaited -= 1
            if not (pending.operation.awaited or pending.done.is_set()):
                self.left(pending.operation)
        if pending.failure:
            raise pending.failure
        return cast("T", pending.result)

    def on(self, workers: Iterable[Worker]) -> list[Operation]:
        """Those that run on one of these workers, or wait to."""
        asked = set(workers)
        return [operation for operation in self.running if not asked.isdisjoint(operation.workers)]

    def _is_last(self, operation: Operation) -> bool:
        """Whether nothing was asked of its workers since."""
        later = self.running[self.running.index(operation) + 1 :]
        return not any(set(operation.workers) & set(other.workers) for other in later)

    async def _alone(self, operation: Operation, work: Callable[[Operation], Awaitable[T]]) -> T:
        outcome = "cancelled"
        try:
            result = await self._in_turn(operation, work)
        except CallError as error:
            outcome = error.message
            raise
        except Exception as error:
            outcome = type(error).__name__
            log.exception("fleet.fault", operation=operation.name)
            raise
        else:
            outcome = "ok"
            return result
        finally:
            self.running.remove(operation)
            self.ended(operation)
            workers = [worker.id for worker in operation.workers]
            self._journal.add(operation.name, workers, by=operation.by, **operation.note, outcome=outcome, seconds=operation.seconds)
            log.info("fleet.operation", operation=operation.name, by=operation.by, outcome=outcome, seconds=operation.seconds)

    async def _in_turn(self, operation: Operation, work: Callable[[Operation], Awaitable[T]]) -> T:
        async with AsyncExitStack() as stack:
            # From here on it may have to wait for others, and is reported when that lasts.
            await stack.enter_async_context(beside(lambda: self._report(operation)))
            # All in one order, so that no two operations wait for each other.
            for id_ in sorted(worker.id for worker in operation.workers):
                await stack.enter_async_context(self._locks.setdefault(id_, trio.Lock()))
            return await work(operation)

    async def _report(self, operation: Operation) -> None:
        while True:
            await trio.sleep(self._settings.stuck_after)
            told = operation.describe()
            log.warning("fleet.stuck", operation=operation.name, seconds=told["seconds"], missing=told["missing"])
