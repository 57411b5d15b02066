"""`/fleet/routing`: which policies place calls, while the proxy runs; `/fleet/route`: where a call would go, and why."""

from typing import Any, cast

import msgspec

from core.errors import BadRequest
from core.explaining import Explainer
from core.fleet.journal import Journal
from core.northbound.asking import who
from core.northbound.body import parse_call
from core.routes import HTTPReply, HTTPRequest, Routes
from core.routing import Routing
from core.settings import RoutingSettings, SettingsError, convert_settings


def add_routing_routes(routes: Routes, routing: Routing, explainer: Explainer, journal: Journal) -> None:
    """`GET` and `PUT /fleet/routing`, `POST /fleet/route`."""

    async def show(_: HTTPRequest) -> HTTPReply:
        return HTTPReply.json(_described(routing))

    async def change(request: HTTPRequest) -> HTTPReply:
        """The body has the keys of `[routing]`, and replaces what is in force; a restart goes back to the settings."""
        wanted = _read(request, routing.settings.retries)
        try:
            routing.change(wanted)
        except SettingsError as error:
            raise BadRequest(str(error).removeprefix("routing.")) from error
        described = _described(routing)
        journal.add("routing", [], by=who(request), **{key: described[key] for key in ("policies", "rules", "max_version_lag")})
        return HTTPReply.json(described)

    async def explain(request: HTTPRequest) -> HTTPReply:
        """The body, and the headers, are those of a generate call."""
        return HTTPReply.json(await explainer.explain(parse_call(request.body, request.headers)))

    routes.add("GET", "/fleet/routing", show)
    routes.add("PUT", "/fleet/routing", change)
    routes.add("POST", "/fleet/route", explain)


def _described(routing: Routing) -> dict[str, Any]:
    described: dict[str, Any] = msgspec.to_builtins(routing.settings)
    del described["retries"]
    return {**described, "available": sorted(routing.available)}


def _read(request: HTTPRequest, retries: int) -> RoutingSettings:
    table = request.json()
    if not isinstance(table, dict) or "policies" not in table:
        raise BadRequest("policies: this field is required: the policies to ask, in their order", param="policies")
    if "retries" in table:
        raise BadRequest("retries: it can't be changed while calls run; it stands in the settings", param="retries")
    try:
        return convert_settings({**cast("dict[str, Any]", table), "retries": retries}, RoutingSettings, source="the body")
    except SettingsError as error:
        raise BadRequest(str(error)) from error
