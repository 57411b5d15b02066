"""Weight updates that headrace drives: one request, one transaction over the fleet."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from core.errors import BadRequest
from core.fleet.administration import Administration
from core.fleet.progress import UpdateRequest
from core.northbound.asking import demand_printable, who, without_query
from core.refusals import refusing
from core.routes import HTTPReply, HTTPRequest, Routes

_Text = Annotated[str, Meta(pattern=r"\S", max_length=1000)]


class Posted(Struct):
    """The core's own keys of `POST /fleet/updates`; all others are the transport's."""

    version: _Text
    transport: _Text
    #: One at most.
    model: str = ""
    cohort: str = ""
    #: What becomes of calls in flight: frozen, finished first, ended.
    mode: Literal["keep", "wait", "abort"] = "keep"
    clear_cache: bool = False
    #: Take the place of an update that a trainer has started by steps, and not finished.
    force: bool = False
    #: Answer when the update has ended.
    wait: bool = False


def add_update_routes(routes: Routes, administration: Administration) -> None:
    """`POST /fleet/updates`, `GET /fleet/updates`, `GET /fleet/updates/<id>`, `DELETE /fleet/updates/<id>`."""

    async def post(request: HTTPRequest) -> HTTPReply:
        """202 with the update; with `wait` 200 once it has succeeded on every worker, or an error that names those that failed."""
        posted, options = _read(request)
        workers = administration.select(model=posted.model, cohort=posted.cohort, update=True, by=who(request))
        pinned = bool(posted.cohort) and not administration.cohorts.get(posted.cohort).substitution
        wanted = UpdateRequest(posted.version, posted.transport, options, posted.mode, posted.clear_cache, pinned, posted.force)
        update = administration.updates.ask(wanted, workers, by=who(request))
        if not posted.wait:
            return HTTPReply.json(update.describe(), 202)
        await update.done.wait()
        if update.failure:
            raise update.failure
        return HTTPReply.json(update.describe())

    async def latest(_: HTTPRequest) -> HTTPReply:
        return HTTPReply.json({"updates": administration.updates.describe_all()})

    async def one(request: HTTPRequest) -> HTTPReply:
        return HTTPReply.json(administration.updates.describe(request.parameters["id"]))

    async def give_up(request: HTTPRequest) -> HTTPReply:
        """202: the update ends, and whom it has paused goes on; workers in the middle of getting their weights are quarantined. 409 when
        it is over.
        """
        return HTTPReply.json(await administration.give_up(request.parameters["id"], by=who(request)), 202)

    routes.add("DELETE", "/fleet/updates/<id>", without_query(give_up))
    routes.add("POST", "/fleet/updates", without_query(post))
    routes.add("GET", "/fleet/updates", without_query(latest))
    routes.add("GET", "/fleet/updates/<id>", without_query(one))


def _read(request: HTTPRequest) -> tuple[Posted, Mapping[str, Any]]:
    if not request.body.strip():
        raise BadRequest("a JSON body is needed, with version and transport at least")
    with refusing("", Posted):
        body = msgspec.json.decode(request.body, type=dict[str, Any])
        posted = msgspec.convert(body, Posted)
    demand_printable("version", posted.version)
    return posted, {key: value for key, value in body.items() if key not in Posted.__struct_fields__}
