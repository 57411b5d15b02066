"""What the administration's routes have in common: who asks, for whom, and for what."""

import re
from collections.abc import Awaitable, Callable, Collection
from typing import Final, TypeVar
from urllib.parse import unquote

import msgspec
from msgspec import Struct
from msgspec.structs import fields

from core.errors import BadRequest
from core.fleet.administration import Administration
from core.fleet.worker import Worker
from core.refusals import refusing
from core.routes import HTTPReply, HTTPRequest

T = TypeVar("T", bound=Struct)

#: What would break, or repaint, a line of a log or a terminal.
_CONTROL: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def who(request: HTTPRequest) -> str:
    """Who asks, as the journal names it: the client's address, and what it calls itself."""
    return f"{request.client} {request.headers.get('user-agent', '')[:100]}".strip() or "somebody"


def whom(administration: Administration, request: HTTPRequest, *, update: bool = False) -> list[Worker]:
    """The workers that a request is for, by its path (`/workers/<id>/…`, `/cohorts/<cohort>/…`) or `?model=`.

    `update` and what it raises: see `Administration.select`.
    """
    return administration.select(
        worker=unquote(request.parameters.get("id", "")),
        cohort=request.parameters.get("cohort", ""),
        model=request.query.get("model", ""),
        update=update,
        by=who(request),
    )


def demand_known(request: HTTPRequest, known: Collection[str], *, lists: Collection[str] = ()) -> None:
    """Refuse a query with other keys than these, or with one of them twice unless it is one of `lists`: they would be dropped without a
    word. Raises: `BadRequest`.
    """
    if unknown := sorted(request.query.keys() - set(known)):
        text = f"known in the query of {request.path} are {', '.join(sorted(known))}" if known else f"{request.path} takes no query"
        raise BadRequest(f"{unknown[0]}: there is no such key here; {text}", param=unknown[0])
    for key, values in request.repeated.items():
        if len(values) > 1 and key not in lists:
            raise BadRequest(f"{key}: it is {len(values)} times in the query of {request.path}; send it once", param=key)


def without_query(handler: Callable[[HTTPRequest], Awaitable[HTTPReply]]) -> Callable[[HTTPRequest], Awaitable[HTTPReply]]:
    """The handler of a route that takes no query, and refuses one."""

    async def answer(request: HTTPRequest) -> HTTPReply:
        demand_known(request, ())
        return await handler(request)

    return answer


def demand_printable(key: str, version: str | None) -> None:
    """Refuse a version that can't be shown on a line as it is. Raises: `BadRequest`."""
    if version and _CONTROL.search(version):
        raise BadRequest(f"{key}: it must not have control characters", param=key)


def demand_no_body(request: HTTPRequest) -> None:
    """Refuse a body where none is taken; an empty object says nothing. Raises: `BadRequest`."""
    if request.body.strip() and request.json() != {}:
        raise BadRequest(f"the body: {request.path} takes none; what it needs to know stands in the query")


def read_body(request: HTTPRequest, type_: type[T]) -> T:
    """The body as JSON of that type. Raises: `BadRequest`."""
    if not request.body.strip():
        raise BadRequest(f"a JSON body is needed, with {', '.join(field.encode_name for field in fields(type_))}")
    with refusing("", type_):
        return msgspec.json.decode(request.body, type=type_)
