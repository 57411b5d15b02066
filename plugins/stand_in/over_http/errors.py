"""vLLM's error bodies, and what is read from a request."""

from typing import Any, TypeVar

import msgspec
from quart import Request, Response

from plugins.stand_in.engine.refusal import Problem, Refused

STATUSES = {
    Problem.INVALID: (400, "BadRequestError"),
    Problem.ALREADY_EXISTS: (400, "BadRequestError"),
    Problem.PRECONDITION: (400, "BadRequestError"),
    Problem.NOT_FOUND: (404, "NotFoundError"),
    Problem.UNAVAILABLE: (503, "ServiceUnavailableError"),
    Problem.INTERNAL: (500, "InternalServerError"),
}

_T = TypeVar("_T")


class Malformed(Exception):
    """The body is not JSON, or its fields have the wrong types: 400 with the type `Bad Request`."""


def error_body(message: str, kind: str, code: int, *, param: str | None = None) -> dict[str, Any]:
    """The object that vLLM answers with, and streams when it is too late for a status."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def refused_body(refused: Refused) -> tuple[dict[str, Any], int]:
    """Body and status of a refusal."""
    code, kind = STATUSES[refused.problem]
    return error_body(refused.message, kind, code, param=refused.param), code


def json_response(value: Any, status: int = 200) -> Response:
    """A JSON response."""
    return Response(msgspec.json.encode(value), status, content_type="application/json")


def empty_response(status: int = 200) -> Response:
    """A response without a body."""
    response = Response(b"", status)
    del response.headers["content-type"]
    return response


async def read_json(request: Request, model: type[_T]) -> _T:
    """The body as a `model`. Raises `Malformed`."""
    if request.mimetype != "application/json":
        raise Malformed("Expected request with `Content-Type: application/json`")
    return _decode(await request.get_data(), model)


async def read_json_if_any(request: Request, model: type[_T]) -> _T:
    """As `read_json`, but an absent body reads as an empty object."""
    data = await request.get_data()
    return _decode(data or b"{}", model)


def _decode(data: bytes | str, model: type[_T]) -> _T:
    try:
        return msgspec.json.decode(data, type=model)
    except msgspec.ValidationError as error:
        raise Malformed(f"Failed to deserialize the JSON body into the target type: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Malformed(f"Failed to parse the request body as JSON: {error}") from error
