"""What the administration's routes have in common: who asks, for whom, and for what."""

from typing import TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import fields

from core.errors import BadRequest
from core.refusals import refusing
from core.routes import HTTPRequest

T = TypeVar("T", bound=Struct)


def who(request: HTTPRequest) -> str:
    """Who asks, as the journal names it: the client's address, and what it calls itself."""
    return f"{request.client} {request.headers.get('user-agent', '')[:100]}".strip() or "somebody"


def read_body(request: HTTPRequest, type_: type[T]) -> T:
    """The body as JSON of that type. Raises: `BadRequest`."""
    if not request.body.strip():
        raise BadRequest(f"a JSON body is needed, with {', '.join(field.encode_name for field in fields(type_))}")
    with refusing("", type_):
        return msgspec.json.decode(request.body, type=type_)
