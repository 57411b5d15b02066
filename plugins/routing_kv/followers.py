"""Following the events of every worker that is there."""

from collections.abc import Callable, Mapping

import httpx
import msgspec
import structlog
import trio
import zmq
from grpclib.exceptions import GRPCError

from core import Worker
from plugins.routing_kv.addresses import Addresses
from plugins.routing_kv.index import Index
from plugins.routing_kv.places import Place, Places
from plugins.routing_kv.sources import Source, SourceSettings, discover
from plugins.routing_kv.subscription import Subscription

log = structlog.stdlib.get_logger()

#: Seconds after which a worker is asked again for its sources when it doesn't answer: first, and at most.
_RETRY = (1.0, 30.0)
#: Seconds that it may take to answer.
_ANSWER = 30.0
#: Blocks that are swept before others get a turn: about half a millisecond.
_SWEEP = 500


class Followers:
    """One task for each worker, and one that sweeps the index; no threads but ZeroMQ's own one."""

    def __init__(self, places: Places, index: Index, sources: Mapping[str, SourceSettings]) -> None:
        #: By place, as long as it is followed.
        self.subscriptions: dict[Place, Subscription] = {}
        self._places = places
        self._index = index
        self._sources = sources
        self._addresses = Addresses()
        self._present: dict[Worker, trio.CancelScope] = {}
        self._needed = trio.Event()
        self._start: Callable[[Worker], None] | None = None

    def need(self) -> None:
        """Somebody asks for what the events say; before, no one listens to them."""
        self._needed.set()

    def join(self, worker: Worker) -> None:
        """A worker is there."""
        self._present[worker] = trio.CancelScope()
        if self._start:
            self._start(worker)

    def leave(self, worker: Worker) -> None:
        """A worker is gone."""
        if scope := self._present.pop(worker, None):
            scope.cancel()
        for place in self._places.forget(worker):
            self.subscriptions.pop(place, None)

    async def run(self) -> None:
        """Follow until cancelled."""
        await self._needed.wait()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            async with trio.open_nursery() as nursery:

                def start(worker: Worker) -> None:
                    nursery.start_soon(self._follow, context, worker, self._present[worker])

                self._start = start
                for worker in self._present:
                    start(worker)
                await self._sweep()
        finally:
            self._start = None
            context.destroy(linger=0)

    async def _sweep(self) -> None:
        while True:
            unswept = trio.Event()
            self._index.on_unswept = unswept.set
            while self._index.unswept:
                self._index.sweep(_SWEEP)
                await trio.lowlevel.checkpoint()
            await unswept.wait()

    async def _follow(self, context: "zmq.Context[zmq.Socket[bytes]]", worker: Worker, scope: trio.CancelScope) -> None:
        with scope:
            settings = self._sources.get(worker.id)
            sources = settings.of(worker) if settings else await self._discover(worker)
            if not sources:
                log.info("kv.no_events", worker=worker.id, reason="its engines publish none: what it has is guessed")
            async with trio.open_nursery() as nursery:
                free = list(self._places.of(worker))
                for source in sources:
                    place = next((place for place in free if place.rank in (None, source.rank)), None)
                    if place is None:
                        log.warning("kv.source_ignored", worker=worker.id, rank=source.rank, reason="the worker names no such rank")
                        continue
                    free.remove(place)
                    subscription = Subscription(context, source, place.feed, worker=worker.id, ended=place.ended)
                    self.subscriptions[place] = subscription
                    nursery.start_soon(self._subscribe, subscription, worker, source)

    async def _subscribe(self, subscription: Subscription, worker: Worker, source: Source) -> None:
        try:
            await self._addresses.follow(worker.id, subscription)
        except zmq.ZMQError as error:
            log.error("kv.not_subscribed", worker=worker.id, rank=source.rank, endpoint=source.endpoint, reason=error.strerror)  # noqa: TRY400

    async def _discover(self, worker: Worker) -> list[Source]:
        seconds, longest = _RETRY
        while True:
            try:
                with trio.fail_after(_ANSWER):
                    return await discover(worker)
            except (GRPCError, httpx.HTTPError, trio.TooSlowError) as error:
                log.warning("kv.sources_unknown", worker=worker.id, reason=str(error) or type(error).__name__, retry_seconds=seconds)
            except msgspec.MsgspecError as error:
                log.warning("kv.sources_unknown", worker=worker.id, reason=str(error))
                return []
            await trio.sleep(seconds)
            seconds = min(2 * seconds, longest)
