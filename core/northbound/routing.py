"""`/fleet/routing`: which policies place calls, while the proxy runs; `/fleet/route`: where a call would go, and why."""

from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType, field

from core.errors import BadRequest
from core.explaining import Explainer
from core.fleet.journal import Journal
from core.northbound.asking import read_body, who
from core.northbound.body import parse_call
from core.routes import HTTPReply, HTTPRequest, Routes
from core.routing import Routing
from core.settings import Lag, Policies, RoutingRule, RoutingSettings, SettingsError


class _Wanted(Struct, forbid_unknown_fields=True):
    """The body of `PUT /fleet/routing`; what `GET` answers is one."""

    policies: Policies
    rules: list[RoutingRule] = field(default_factory=list[RoutingRule])
    max_version_lag: Lag = None
    #: Tells what there is, and changes nothing.
    available: list[str] | UnsetType = UNSET
    #: Refused, in words of its own.
    retries: Any = UNSET


def add_routing_routes(routes: Routes, routing: Routing, explainer: Explainer, journal: Journal) -> None:
    """`GET` and `PUT /fleet/routing`, `POST /fleet/route`."""

    async def show(_: HTTPRequest) -> HTTPReply:
        return HTTPReply.json(_described(routing))

    async def change(request: HTTPRequest) -> HTTPReply:
        """The body has the keys of `[routing]`, and replaces what is in force: what it leaves out has its default. A restart goes back to
        the settings.
        """
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
    wanted = read_body(request, _Wanted)
    if wanted.retries is not UNSET:
        raise BadRequest("retries: it can't be changed while calls run; it stands in the settings", param="retries")
    return RoutingSettings(wanted.policies, wanted.rules, retries, wanted.max_version_lag)
