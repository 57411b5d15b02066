"""What headrace serves and runs beside calls."""

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from core.hookspecs.markers import hookspec

if TYPE_CHECKING:
    from core.fleet.worker import Worker
    from core.northbound.models import ModelCard
    from core.proxy import Proxy
    from core.routes import Routes


class ProxySpecs:
    """What a plugin can add to the proxy."""

    @hookspec
    def register_routes(self, routes: "Routes", proxy: "Proxy") -> None:
        """Add HTTP routes.

        Runs once, when the proxy opens. `routes.add("POST", "/my/route", handler)`; the handler is `async def (HTTPRequest) -> HTTPReply`
        and may raise `CallError`; what else it raises is a 500 that names the plugin. A handler that writes its answer piece by piece goes
        to `routes.add_streamed`; one whose answer is a worker's own awaits `proxy.relay(exchange)`. May add to `routes`; reads `proxy`,
        and changes nothing there.

        Raises: nothing; an error ends the start.

        Example: a page that says how many workers there are.

            @hookimpl
            def register_routes(self, routes: Routes, proxy: Proxy) -> None:
                async def count(request: HTTPRequest) -> HTTPReply:
                    return HTTPReply.json({"workers": len(proxy.fleet.workers)})

                routes.add("GET", "/count", count)
        """

    @hookspec
    def list_models(self) -> "Sequence[ModelCard] | None":
        """Name what else calls may put into `model`, beside the names that the workers serve: adapters, say.

        Runs at each `GET /v1/models`. A card that has no `max_model_len` gets that of the card whose name is its `parent`, because clients
        take the length from the card of the model that they ask for. A name that a worker serves keeps the worker's card. Changes nothing.

        Raises: `CallError`, which is then the answer.

        Example: an adapter.

            @hookimpl
            def list_models(self) -> Sequence[ModelCard]:
                return [ModelCard(id="math", root="/adapters/math", parent="tiny")]
        """

    @hookspec
    def explain_unready(self, model: str, workers: "Sequence[Worker]") -> "str | None":
        """Say what calls to a model lack, although a worker is there that answers whole calls.

        Runs at each `GET /health` and `GET /ready`, for each model of which such a worker is there, until one lacks nothing: then the
        answer is 200. `model` is its main name, `workers` are those of its workers that take calls, or will after a pause, whatever their
        roles. Returns why its calls can't be answered, `None` when they can. Changes nothing.

        Raises: nothing; an exception is a 500 that names the plugin.

        Example: no call without its judge.

            @hookimpl
            def explain_unready(self, model: str, workers: Sequence[Worker]) -> str | None:
                return None if self.judge_is_there else f"{model}: the judge of its {len(workers)} workers isn't there"
        """

    @hookspec
    def session_finished(self, session_id: str) -> None:
        """A session is over: its client has said that no call with this `session_id` will come any more.

        Runs each time that a client says so, whoever it is: the id may be unknown, may have been told before, and calls of the session
        may still be in flight. A session that nobody ends is never told, so what is kept of sessions needs a bound of its own. Every
        plugin is told, whatever another one raises. Changes nothing.

        Raises: nothing; an exception is logged with the plugin's name.

        Example: forget where the session's calls went.

            @hookimpl
            def session_finished(self, session_id: str) -> None:
                self.homes.pop(session_id, None)
        """

    @hookspec
    def collect_metrics(self, registry: Any) -> None:
        """Register metrics: `registry` is the `prometheus_client.CollectorRegistry` behind `GET /metrics`.

        Runs once, when the proxy opens. Names start with `headrace_`. May add to `registry`, and changes nothing else.

        Raises: nothing; an error ends the start.

        Example:

            @hookimpl
            def collect_metrics(self, registry: CollectorRegistry) -> None:
                self.hits = Counter("headrace_my_hits", "Calls whose session was known", registry=registry)
        """

    @hookspec
    def run_service(self, proxy: "Proxy") -> "Callable[[], Awaitable[None]] | None":
        """Run something for the proxy's whole life, in the proxy's own nursery: discovery, a broker, a subscription.

        Runs once, when the proxy opens; async: returns an async function without arguments, which the core starts, and cancels when the
        proxy closes. It may return early. The service may change the fleet through `proxy.fleet.serve`, and nothing else. Unless it is
        cancelled, an exception ends the service, is logged with the plugin's name, and leaves the proxy running.

        Raises: nothing; an error of the hook itself ends the start.

        Example: a worker that is known only at run time.

            @hookimpl
            def run_service(self, proxy: Proxy) -> Callable[[], Awaitable[None]]:
                async def service() -> None:
                    await proxy.fleet.serve(WorkerSettings(grpc=await self.look_up()))

                return service
        """
