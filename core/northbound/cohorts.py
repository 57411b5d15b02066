"""Cohorts by name: which workers a trainer has selected."""

from typing import Annotated

from msgspec import Meta, Struct

from core.fleet.administration import Administration
from core.northbound.asking import read_body, who, without_query
from core.routes import HTTPReply, HTTPRequest, Routes

# A name is a part of a path.
_Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]


class CohortBody(Struct, forbid_unknown_fields=True):
    """Body of `POST /fleet/cohorts`."""

    name: _Name
    model: str = ""
    #: In rank order; all workers of the model when it is missing.
    workers: list[str] | None = None
    substitution: bool = False


def add_cohort_routes(routes: Routes, administration: Administration) -> None:
    """`POST /fleet/cohorts`, `GET /fleet/cohorts`, `DELETE /fleet/cohorts/<name>`."""
    cohorts = administration.cohorts

    async def select(request: HTTPRequest) -> HTTPReply:
        body = read_body(request, CohortBody)
        cohort = administration.select_cohort(body.name, body.model, body.workers, substitution=body.substitution, by=who(request))
        return HTTPReply.json(cohorts.describe_one(cohort))

    async def describe(_: HTTPRequest) -> HTTPReply:
        return HTTPReply.json({"cohorts": cohorts.describe()})

    async def drop(request: HTTPRequest) -> HTTPReply:
        cohorts.drop(request.parameters["name"], by=who(request))
        return HTTPReply()

    routes.add("POST", "/fleet/cohorts", without_query(select))
    routes.add("GET", "/fleet/cohorts", without_query(describe))
    routes.add("DELETE", "/fleet/cohorts/<name>", without_query(drop))
