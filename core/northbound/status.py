"""The routes that say how headrace and its fleet are."""

from importlib.metadata import version
from typing import Any

from core.errors import NoWorker
from core.fleet.fleet import Fleet
from core.metrics import Metrics
from core.registry import Registry
from core.routes import HTTPReply, HTTPRequest, Routes


def add_status_routes(routes: Routes, fleet: Fleet, metrics: Metrics, registry: Registry) -> None:
    """`/health`, `/ready`, `/live`, `/v1/models`, `/version`, `/metrics`, `/fleet`, `/plugins`."""

    async def health(_: HTTPRequest) -> HTTPReply:
        """200 when a call could be served, as a vLLM server's `/health` says it of itself."""
        if not any(worker.state in ("ready", "paused", "updating") for worker in fleet.workers.values()):
            return HTTPReply.error(NoWorker("no worker is ready"))
        return HTTPReply()

    async def live(_: HTTPRequest) -> HTTPReply:
        return HTTPReply()

    async def models(_: HTTPRequest) -> HTTPReply:
        return HTTPReply.json({"object": "list", "data": _cards(fleet)})

    async def versions(_: HTTPRequest) -> HTTPReply:
        return HTTPReply.json({"version": version("headrace")})

    async def scrape(_: HTTPRequest) -> HTTPReply:
        return HTTPReply(metrics.text(), content_type="text/plain; version=0.0.4; charset=utf-8")

    async def workers(_: HTTPRequest) -> HTTPReply:
        return HTTPReply.json({"workers": [worker.describe() for worker in fleet.workers.values()]})

    async def plugins(_: HTTPRequest) -> HTTPReply:
        return HTTPReply.json(registry.describe())

    routes.add("GET", "/health", health)
    routes.add("GET", "/ready", health)
    routes.add("GET", "/live", live)
    routes.add("GET", "/v1/models", models)
    routes.add("GET", "/version", versions)
    routes.add("GET", "/metrics", scrape)
    routes.add("GET", "/fleet", workers)
    routes.add("GET", "/plugins", plugins)


def _cards(fleet: Fleet) -> list[dict[str, Any]]:
    """One card per served name over all workers; of different context lengths, the shortest is what every worker takes."""
    cards: dict[str, dict[str, Any]] = {}
    for worker in fleet.workers.values():
        if worker.info is None or worker.state in ("starting", "gone"):
            continue
        for name in worker.info.models:
            card = cards.setdefault(
                name,
                {
                    "id": name,
                    "object": "model",
                    "created": int(worker.introduced_at),
                    "owned_by": "headrace",
                    "root": worker.info.model_id,
                    "parent": None,
                    "max_model_len": worker.info.max_model_len,
                },
            )
            card["max_model_len"] = min(card["max_model_len"], worker.info.max_model_len)
    return list(cards.values())
