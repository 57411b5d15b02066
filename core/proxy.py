"""The proxy as a whole: opens everything in order, and is the ASGI application while it is open."""

import gc
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final

import structlog
import trio

from core.call import Call
from core.explaining import Explainer
from core.fleet.administration import Administration
from core.fleet.fleet import Fleet
from core.fleet.transport import by_name
from core.fleet.worker import Worker
from core.hookcalls import is_end
from core.hookspecs import Choice
from core.loading import load_plugins
from core.log import configure_log
from core.metrics import Metrics
from core.northbound.administration import add_administration_routes
from core.northbound.cohorts import add_cohort_routes
from core.northbound.generate import PATH, GenerateRoute
from core.northbound.pausing import add_pausing_routes
from core.northbound.relay import Relay
from core.northbound.routing import add_routing_routes
from core.northbound.sessions import add_session_routes
from core.northbound.status import add_status_routes
from core.northbound.updates import add_update_routes
from core.path import Path
from core.placement import Placer
from core.registry import Registry
from core.routes import Routes
from core.routing import Routing
from core.serving.asgi import ASGIApp, Receive, Scope, Send
from core.serving.client import MIB, Clients
from core.settings import Settings

log = structlog.stdlib.get_logger()

#: For clients to be answered that wait for something which headrace's end has ended.
_LAST_ANSWERS: Final = 0.5


class Proxy:
    """What plugins see of the proxy (`register_routes`, `run_service`): its settings and its fleet."""

    def __init__(self, settings: Settings, registry: Registry) -> None:
        self.settings = settings
        self.registry = registry
        self.fleet = Fleet(settings.probe, settings.gate, registry)
        #: For plugins' own administration routes: select workers, then pause, update, read them.
        self.administration = Administration(self.fleet, settings.administration, by_name(registry.transports()))
        self._metrics = Metrics(self.fleet)
        self._metrics.watch(self.administration)
        self._routing = Routing(registry, settings.routing)
        placer = Placer(registry, self.fleet, self._routing)
        path = Path(registry, placer, self._metrics, retries=settings.routing.retries)
        #: Requests beside the hottest route.
        self._asked, self._answered = 0, trio.lowlevel.ParkingLot()
        self._clients = Clients(settings.server.stall_timeout)
        #: Runs a part of a call, for `begin_attempt`: `reply, outcome = await proxy.leg(call)`, see `core.path.Path.leg`.
        self.leg = path.leg
        self._placer = placer
        #: Relays a request to a worker's HTTP server, as a handler of `Routes.add_streamed`: `await proxy.relay(exchange)`.
        self.relay = Relay(path, self._clients)
        self._generate = GenerateRoute(path, self._clients, settings.server)
        self._routes = Routes(max_body_bytes=settings.server.max_body_mib * MIB, body_timeout=settings.server.body_timeout)
        add_status_routes(self._routes, self.fleet, self.administration, self._metrics, registry)
        add_administration_routes(self._routes, self.administration, registry)
        add_update_routes(self._routes, self.administration)
        add_cohort_routes(self._routes, self.administration)
        add_pausing_routes(self._routes, self.administration)
        add_session_routes(self._routes, self.finish_session)
        add_routing_routes(self._routes, self._routing, Explainer(registry, self.fleet, placer, path), self.administration.journal)
        registry.call("collect_metrics", registry=self._metrics.registry)
        registry.register_routes(self._routes, self)

    async def asgi(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One HTTP request. Cancellation ends its call on the worker at once."""
        if scope["path"] == PATH:
            await self._generate(scope, receive, send)
            return
        self._asked += 1
        try:
            await self._routes(scope, receive, send)
        finally:
            self._asked -= 1
            self._answered.unpark_all()

    #: What a server calls: see `core.serving.asgi.Ending`.
    __call__ = asgi

    def stop(self) -> None:
        """Headrace is going to end: a weight update that only prepares is given up, and whoever waits for it is told."""
        self.administration.updates.stop()

    async def end(self) -> None:
        """End the calls, and the administration, see there, and give their clients the time to get their answers."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._clients.end)
            await self.administration.end()
            nursery.cancel_scope.deadline = trio.current_time() + _LAST_ANSWERS
            while self._asked:
                await self._answered.park()

    def preview(self, call: Call) -> Choice:
        """Where the call would go now. Nothing follows from it. Raises: `CallError`, when it could go nowhere."""
        return self._placer.place(call, {}).choice

    def candidates(self, call: Call) -> Sequence[Worker]:
        """The workers that may take the call now, at least one. Raises: `CallError`, when there is none."""
        return self._placer.candidates(call)

    def finish_session(self, session_id: str) -> None:
        """Tell every plugin that a session is over, see the hook `session_finished`. Nothing happens to its calls."""
        self.registry.tell("session_finished", session_id=session_id)

    async def run(self) -> None:
        """Run the fleet and its administration, and let go of clients that stall.

        Cancellation: the workers leave, and operations end where they stand.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._clients.run)
            nursery.start_soon(self.administration.run)
            nursery.start_soon(self.fleet.run, self.settings.workers)

    async def run_service(self, name: str, service: Callable[[], Awaitable[None]]) -> None:
        """Run a plugin's service; its failure is the plugin's, not the proxy's."""
        try:
            await service()
        except BaseException as error:
            if is_end(error):
                raise
            log.exception("service.failed", plugin=name)


@asynccontextmanager
async def open_proxy(settings: Settings, registry: Registry | None = None) -> AsyncGenerator[Proxy, None]:
    """Load the plugins, start the fleet and the services, and stop them all when the block ends.

    Raises: `SettingsError`; `PluginFault` for what a plugin raises in a hook that runs once, at the start.
    """
    configure_log(settings.log)
    proxy = Proxy(settings, registry or load_plugins(settings))
    services = proxy.registry.services(proxy)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(proxy.run)
        for name, service in services:
            nursery.start_soon(proxy.run_service, name, service)
        yield proxy
        await proxy.administration.end()
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def open_asgi(settings: Settings, registry: Registry | None = None) -> AsyncGenerator[ASGIApp, None]:
    """`open_proxy`, as what an ASGI host wants of it, in a process that does nothing else. Raises as it does."""
    async with open_proxy(settings, registry) as proxy:
        _spare_the_collector()
        yield proxy


def _spare_the_collector() -> None:
    """A long reply is tens of thousands of objects, none in a cycle. With CPython's own thresholds the garbage collector looks at them some
    twenty times, a fifth of the CPU of a call of 30,000 and 8,000 tokens; what was loaded at the start never has to be looked at.
    """
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
