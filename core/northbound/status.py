"""The routes that say how headrace and its fleet are."""

from importlib.metadata import version

from core.errors import NoWorker
from core.fleet.administration import Administration
from core.fleet.fleet import Fleet
from core.metrics import Metrics
from core.northbound.models import list_models
from core.registry import Registry
from core.routes import HTTPReply, HTTPRequest, Routes


def add_status_routes(routes: Routes, fleet: Fleet, administration: Administration, metrics: Metrics, registry: Registry) -> None:
    """`/health`, `/ready`, `/live`, `/v1/models`, `/version`, `/metrics`, `/fleet`, `/fleet/journal`, `/plugins`."""

    async def health(_: HTTPRequest) -> HTTPReply:
        """200 when a call could be served, as a vLLM server's `/health` says it of itself."""
        if not any(worker.state in ("ready", "paused", "updating") for worker in fleet.workers.values()):
            return HTTPReply.error(NoWorker("no worker is ready"))
        return HTTPReply()

    async def live(_: HTTPRequest) -> HTTPReply:
        return HTTPReply()

    async def models(_: HTTPRequest) -> HTTPReply:
        return HTTPReply.json({"object": "list", "data": list_models(fleet, registry)})

    async def versions(_: HTTPRequest) -> HTTPReply:
        return HTTPReply.json({"version": version("headrace")})

    async def scrape(_: HTTPRequest) -> HTTPReply:
        return HTTPReply(metrics.text(), content_type="text/plain; version=0.0.4; charset=utf-8")

    async def workers(_: HTTPRequest) -> HTTPReply:
        described = [worker.describe() for worker in fleet.workers.values()]
        return HTTPReply.json({"workers": described, "operations": administration.describe()})

    async def journal(_: HTTPRequest) -> HTTPReply:
        return HTTPReply.json({"entries": list(administration.journal.entries)})

    async def plugins(_: HTTPRequest) -> HTTPReply:
        return HTTPReply.json(registry.describe())

    routes.add("GET", "/health", health)
    routes.add("GET", "/ready", health)
    routes.add("GET", "/live", live)
    routes.add("GET", "/v1/models", models)
    routes.add("GET", "/version", versions)
    routes.add("GET", "/metrics", scrape)
    routes.add("GET", "/fleet", workers)
    routes.add("GET", "/fleet/journal", journal)
    routes.add("GET", "/plugins", plugins)
