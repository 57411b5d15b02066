"""The weight updates that headrace drives: asked for, in turn, joined when they are the same, remembered for a while."""

import math
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

import structlog
import trio

from core.errors import BadRequest, CallError, NotFound, NoWorker
from core.fleet.history import past_updates
from core.fleet.journal import Journal
from core.fleet.methods import REPLACING
from core.fleet.operations import Operation, Operations, digest
from core.fleet.progress import KEPT, Update, UpdateRequest
from core.fleet.repeating import MethodTransport
from core.fleet.trainer_updates import TrainerUpdates
from core.fleet.transport import WeightTransport
from core.fleet.update import Transaction
from core.fleet.worker import Worker
from core.hookcalls import is_end
from core.wording import nearest

log = structlog.stdlib.get_logger()


class Updates:
    """Runs updates in a nursery of its own, for as long as `run` does.

    Those on the same workers come one after the other, in the order in which they were asked for: one that is still preparing is
    overtaken, and then fails.
    """

    def __init__(
        self,
        operations: Operations,
        transaction: Transaction,
        trainers: TrainerUpdates,
        journal: Journal,
        transports: Mapping[str, WeightTransport],
    ) -> None:
        self._operations = operations
        self._transaction = transaction
        self._trainers = trainers
        self._journal = journal
        self.transports = transports
        self._methods = {name: MethodTransport(name) for name in REPLACING}
        self._updates: dict[str, Update] = {}
        #: Told of each that has ended.
        self.ended: Callable[[Update], None] = lambda _: None
        self._stopped = False
        #: Those of headraces before this one.
        self._past = past_updates(journal)
        self._send, self._receive = trio.open_memory_channel[Update](math.inf)

    async def run(self) -> None:
        """Run what is asked for. Cancellation ends it, and every update where it stands."""
        async with trio.open_nursery() as nursery:
            async for update in self._receive:
                nursery.start_soon(self._carry_out, update)

    def ask(self, request: UpdateRequest, workers: Sequence[Worker], *, by: str, again: int | None = None) -> Update:
        """Ask for an update of these workers; it runs whatever becomes of who has asked.

        The same request while it runs or waits gives the same update, unless another one was asked for since. `again` is the number of
        the weights when others have them already, maybe by a method.

        Raises: `BadRequest`, which names the key; `CallError`: 500 for a fault of the transport, 409 while an update by steps is open,
        503 after `stop`.
        """
        transport = self.transports.get(request.transport)
        if again is not None:
            transport = self._methods.get(request.transport, transport)
        if transport is None:
            known = nearest(request.transport, sorted(self.transports))
            raise BadRequest(f"transport: there is no weight transport {request.transport!r}; {known}", param="transport")
        options = _parse(transport, request)
        running = self.running(workers)
        if running and digest(running[-1].request) == digest(request) and running[-1].workers == tuple(workers):
            return running[-1]
        if self._stopped:
            raise NoWorker("update: headrace ends")
        self._transaction.demand_closed(request, workers)
        update = Update(secrets.token_hex(4), request, transport, options, workers, by, again)
        self._remember(update)
        self._journal.add("update_asked", [worker.id for worker in workers], by=by, **update.note())
        self._send.send_nowait(update)
        return update

    def stop(self) -> None:
        """Headrace is going to end: give up those that have not come to the weights, and take no others."""
        self._stopped = True
        for update in self._updates.values():
            if not update.done.is_set():
                update.stop()

    def running(self, workers: Iterable[Worker]) -> list[Update]:
        """Those that run on one of these workers, or wait to, in their order."""
        return [update for update in self._updates.values() if not update.done.is_set() and not set(workers).isdisjoint(update.workers)]

    def get(self, id_: str) -> Update:
        """The update of that id. Raises: `NotFound`."""
        if update := self._updates.get(id_):
            return update
        raise NotFound(f"there is no update {id_!r}; the latest {KEPT} are kept")

    def describe(self, id_: str) -> dict[str, Any]:
        """`GET /fleet/updates/<id>`. Raises: `NotFound`."""
        trainers = self._trainers.get(id_)
        return self._past.get(id_) or (trainers or self.get(id_)).describe()

    def describe_all(self) -> list[dict[str, Any]]:
        """`GET /fleet/updates`: those that run and the latest that have ended, also before a restart; the newest first."""
        both = sorted([*self._updates.values(), *self._trainers.latest], key=lambda update: update.began, reverse=True)
        shown = [update.describe() for update in both]
        return [*shown, *list(reversed(self._past.values()))[: max(KEPT - len(shown), 0)]]

    def latest(self) -> list[Update]:
        """Those that run and the latest that have ended, the newest first."""
        return list(reversed(self._updates.values()))

    def _remember(self, update: Update) -> None:
        self._updates[update.id] = update
        ended = [id_ for id_, one in self._updates.items() if one.done.is_set()]
        for id_ in ended[:-KEPT]:
            del self._updates[id_]

    async def _carry_out(self, update: Update) -> None:
        failure: CallError | None = NoWorker("the update was cut: headrace ends; nobody knows how far the workers came")
        log.info("update.asked", **update.note(), workers=[worker.id for worker in update.workers], by=update.by)
        try:
            await self._prepare(update)
            update.begun = True
            self._overtake(update)
            with trio.CancelScope() as waiting:
                update.scopes.append(waiting)
                await self._operations.do(
                    "update",
                    update.workers,
                    lambda operation: self._run(update, operation, waiting),
                    by=update.by,
                    same=update.id,
                    note=update.note(),
                )
            if waiting.cancelled_caught:
                update.demand_wanted()
        except CallError as error:
            failure = error
        except Exception as error:
            log.exception("update.fault", **update.note())
            failure = CallError(500, f"update: a fault of headrace: {type(error).__name__}")
        else:
            failure = None
        finally:
            update.end(failure)
            self.ended(update)
            log.info("update.ended", **update.note(), outcome=failure.message if failure else "ok", seconds=update.seconds)

    async def _run(self, update: Update, operation: Operation, waiting: trio.CancelScope) -> None:
        """Its turn has come: from here on whoever gives it up waits until everybody is as it should be."""
        update.demand_wanted()
        update.scopes.remove(waiting)
        try:
            await self._transaction.run(update, operation)
        finally:
            update.conclude()
            operation.note = {**operation.note, "progress": update.describe_workers()}

    async def _prepare(self, update: Update) -> None:
        """Let the transport prepare. Raises: `CallError`, after the journal was told: no operation has begun that would."""
        failure: CallError | None = None
        try:
            with trio.CancelScope() as scope:
                update.scopes.append(scope)
                for one in self.running(update.workers):
                    if one.begun:
                        await one.done.wait()
                await update.transport.prepare(update.told)
            update.demand_wanted()
            update.demand_cohort()
        except CallError as error:
            failure = error
        except trio.TooSlowError:
            failure = CallError(HTTPStatus.GATEWAY_TIMEOUT, f"update: the transport {update.transport.name!r} has lost patience")
        except BaseException as error:
            if is_end(error):
                raise
            log.exception("update.fault", **update.note())
            failure = CallError(500, f"update: a fault of the transport {update.transport.name!r}: {type(error).__name__}")
        if failure:
            workers = [worker.id for worker in update.workers]
            update.conclude()
            told = {**update.note(), "progress": update.describe_workers(), "outcome": failure.message, "seconds": update.seconds}
            self._journal.add("update", workers, by=update.by, **told)
            raise failure

    def _overtake(self, update: Update) -> None:
        """End those on the same workers that were asked for earlier and still prepare."""
        for earlier in self.running(update.workers):
            if earlier is update:
                return
            if not earlier.begun:
                earlier.overtake(update)


def _parse(transport: WeightTransport, request: UpdateRequest) -> Any:
    try:
        return transport.parse(request.options)
    except CallError:
        raise
    except BaseException as error:
        if is_end(error):
            raise
        log.exception("update.fault", transport=transport.name)
        raise CallError(500, f"update: a fault of the transport {transport.name!r}: {type(error).__name__}") from error
