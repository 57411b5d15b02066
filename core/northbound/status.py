"""The routes that say how headrace and its fleet are; `/workers/<id>/health` and `/workers/<id>/v1/models` say it of one worker."""

import math
from collections.abc import Iterable
from importlib.metadata import version
from typing import Final, TypeVar
from urllib.parse import quote, unquote

from core.candidates import PARTIAL
from core.errors import BadRequest, NotFound, NoWorker
from core.fleet.administration import Administration
from core.fleet.fleet import Fleet
from core.fleet.journal import KEPT
from core.fleet.worker import Worker
from core.metrics import Metrics
from core.northbound.asking import demand_known
from core.northbound.models import list_models
from core.registry import Registry
from core.routes import HTTPReply, HTTPRequest, Routes

N = TypeVar("N", int, float)
_KINDS: Final = {int: "a whole number", float: "a number"}


def add_status_routes(routes: Routes, fleet: Fleet, administration: Administration, metrics: Metrics, registry: Registry) -> None:
    """`/health`, `/ready`, `/live`, `/v1/models`, `/version`, `/metrics`, `/fleet`, `/fleet/journal`, `/plugins`."""

    def workers_of(request: HTTPRequest) -> Iterable[Worker]:
        """The one that the path names, or all."""
        if (id_ := request.parameters.get("id")) is None:
            return fleet.workers.values()
        if worker := fleet.workers.get(unquote(id_)):
            return [worker]
        raise NotFound(f"there is no worker {id_!r}; the fleet has {', '.join(fleet.workers) or 'none'}")

    async def health(request: HTTPRequest) -> HTTPReply:
        """200 when a call could be served, as a vLLM server's `/health` says it of itself: by one worker, or by any model."""
        workers = list(workers_of(request))
        serving = [worker for worker in workers if worker.state in ("ready", "paused", "updating")]
        if not request.parameters:
            why = _why_unready(serving, registry)
        else:
            why = "" if serving else f"worker {workers[0].id!r} is {workers[0].state}: {workers[0].reason}"
        return HTTPReply.error(NoWorker(why)) if why else HTTPReply()

    async def live(_: HTTPRequest) -> HTTPReply:
        return HTTPReply()

    async def models(request: HTTPRequest) -> HTTPReply:
        return HTTPReply.json({"object": "list", "data": list_models(workers_of(request), registry)})

    async def versions(_: HTTPRequest) -> HTTPReply:
        return HTTPReply.json({"version": version("headrace")})

    async def scrape(_: HTTPRequest) -> HTTPReply:
        return HTTPReply(metrics.text(), content_type="text/plain; version=0.0.4; charset=utf-8")

    async def workers(_: HTTPRequest) -> HTTPReply:
        cohorts = administration.cohorts
        described = [
            {**worker.describe(), "cohort": cohorts.name_of(worker), "release": _release(worker)} for worker in fleet.workers.values()
        ]
        weights, running, updates = administration.current.describe(), administration.describe(), administration.describe_updates()
        told = {"workers": described, "cohorts": cohorts.describe(), "weights": weights, "operations": running, "updates": updates}
        return HTTPReply.json(told)

    async def journal(request: HTTPRequest) -> HTTPReply:
        """The oldest first. `since` leaves out what is older (Unix time, in seconds); of what is left `limit` gives the latest."""
        demand_known(request, ("limit", "since"))
        limit, since = _number(request, "limit", KEPT, int), _number(request, "since", 0.0, float)
        entries = [entry for entry in administration.journal.entries if entry.at >= since]
        return HTTPReply.json({"entries": entries[max(len(entries) - limit, 0) :]})

    async def plugins(_: HTTPRequest) -> HTTPReply:
        return HTTPReply.json(registry.describe())

    routes.add("GET", "/health", health)
    routes.add("GET", "/workers/<id>/health", health)
    routes.add("GET", "/ready", health)
    routes.add("GET", "/live", live)
    routes.add("GET", "/v1/models", models)
    routes.add("GET", "/workers/<id>/v1/models", models)
    routes.add("GET", "/version", versions)
    routes.add("GET", "/metrics", scrape)
    routes.add("GET", "/fleet", workers)
    routes.add("GET", "/fleet/journal", journal)
    routes.add("GET", "/plugins", plugins)


def _number(request: HTTPRequest, name: str, default: N, type_: type[N]) -> N:
    """A number of the query that isn't negative. Raises: `BadRequest`."""
    try:
        value = type_(request.query.get(name, default))
    except ValueError:
        value = type_(-1)
    if not 0 <= value < math.inf:
        raise BadRequest(f"{name}: {request.query[name]!r} is not {_KINDS[type_]} from 0 on", param=name)
    return value


def _why_unready(serving: Iterable[Worker], registry: Registry) -> str:
    """Why these workers serve no model; empty when they serve one."""
    models: dict[str, list[Worker]] = {}
    for worker in serving:
        models.setdefault(worker.models[0], []).append(worker)
    reasons: list[str] = []
    for model, workers in models.items():
        if all(worker.role in PARTIAL for worker in workers):
            parts = ", ".join(f"{worker.id} is for {worker.role} only" for worker in workers)
            reasons.append(f"no worker is ready that answers whole calls: {parts}")
        elif told := registry.call("explain_unready", model=model, workers=workers):
            reasons += told
        else:
            return ""
    return "; ".join(reasons) or "no worker is ready"


def _release(worker: Worker) -> str | None:
    """How somebody who answers for the worker gets it out of quarantine."""
    return f"POST /fleet/workers/{quote(worker.id, safe='')}/release" if worker.state == "quarantined" else None
