"""What the administration's routes have in common: who asks, for whom, and for what."""

from typing import TypeVar

import msgspec
from msgspec import Struct

from core.errors import BadRequest
from core.routes import HTTPRequest

T = TypeVar("T", bound=Struct)


def who(request: HTTPRequest) -> str:
    """Who asks, as the journal names it: the client's address, and what it calls itself."""
    return f"{request.client} {request.headers.get('user-agent', '')[:100]}".strip() or "somebody"


def read_body(request: HTTPRequest, type_: type[T]) -> T:
    """The body as JSON of that type. Raises: `BadRequest`."""
    try:
        return msgspec.json.decode(request.body, type=type_)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BadRequest(f"the body: {error}") from error
