"""Pausing and resuming by headrace's own routes: a JSON body, and the fleet as it is then."""

from typing import Literal

from msgspec import Struct

from core.fleet.administration import Administration
from core.fleet.worker import Worker
from core.northbound.asking import read_body, who, without_query
from core.routes import HTTPReply, HTTPRequest, Routes


class ResumeBody(Struct, forbid_unknown_fields=True):
    """Body of `POST /fleet/resume`; it may be missing. Of `model` and `cohort`, one at most."""

    model: str = ""
    cohort: str = ""


class PauseBody(ResumeBody, forbid_unknown_fields=True):
    """Body of `POST /fleet/pause`; it may be missing."""

    #: What becomes of calls in flight: frozen, finished first, ended.
    mode: Literal["keep", "wait", "abort"] = "keep"
    clear_cache: bool = False


def add_pausing_routes(routes: Routes, administration: Administration) -> None:
    """`POST /fleet/pause`, `POST /fleet/resume`."""

    async def pause(request: HTTPRequest) -> HTTPReply:
        body = read_body(request, PauseBody) if request.body.strip() else PauseBody()
        workers = administration.select(model=body.model, cohort=body.cohort)
        await administration.pausing.pause(workers, body.mode, clear_cache=body.clear_cache, by=who(request))
        return _reply(workers)

    async def resume(request: HTTPRequest) -> HTTPReply:
        body = read_body(request, ResumeBody) if request.body.strip() else ResumeBody()
        workers = administration.select(model=body.model, cohort=body.cohort)
        await administration.pausing.resume(workers, by=who(request))
        return _reply(workers)

    routes.add("POST", "/fleet/pause", without_query(pause))
    routes.add("POST", "/fleet/resume", without_query(resume))


def _reply(workers: list[Worker]) -> HTTPReply:
    return HTTPReply.json({"workers": [{"id": worker.id, "state": worker.state, "reason": worker.reason} for worker in workers]})
