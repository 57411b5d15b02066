"""What can go wrong with a call, and what the client is told.

Every refusal is a `CallError`: an HTTP status with vLLM's error body. The two tables at the end are the only places where a worker's
answer, a gRPC status or an HTTP one, becomes ours.
"""

from http import HTTPStatus
from typing import Final

import msgspec
from grpclib.const import Status
from grpclib.exceptions import GRPCError


class ErrorDetail(msgspec.Struct):
    """The inside of vLLM's error body."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(msgspec.Struct):
    """vLLM's error body: `{"error": {"message", "type", "param", "code"}}`."""

    error: ErrorDetail


#: vLLM 0.33's `type` for a status; a status that is not here gets its reason phrase without spaces.
_TYPES: Final = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    409: "Conflict",
    413: "RequestEntityTooLarge",
    499: "ClientClosedRequest",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
}


class CallError(Exception):
    """A call that ends with an error the client is told about.

    `message` says what was wrong, where, and what would be right. `param` is the field's path in the request (`sampling_params.seed`).
    `retry_after` is in seconds and becomes the header of that name.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.retry_after = retry_after

    @property
    def body(self) -> ErrorBody:
        """The error as vLLM would write it."""
        type_ = _TYPES.get(self.status) or HTTPStatus(self.status).phrase.replace(" ", "")
        return ErrorBody(ErrorDetail(self.message, type_, self.param, self.status))


class BadRequest(CallError):
    """400: the request itself is wrong."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(400, message, param=param)


class NotFound(CallError):
    """404: a model, an adapter or a route that does not exist here."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(404, message, param=param)


class NoWorker(CallError):
    """503: no worker can take the call now; the same call may succeed after `retry_after` seconds."""

    def __init__(self, message: str, *, retry_after: int = 1) -> None:
        super().__init__(503, message, retry_after=retry_after)


class ClientGone(CallError):
    """The client closed its connection; nobody reads this answer, but it is what the log and the metrics say."""

    def __init__(self) -> None:
        super().__init__(499, "the client closed the connection before the call had settled")


class CallAborted(CallError):
    """499: somebody has aborted the call before there was an output, at the gate or in a part of it (`begin_attempt`).

    Its client is told as by a worker, with the finish reason `abort`.
    """

    def __init__(self) -> None:
        super().__init__(499, "the call was aborted before its first output")


class PluginFault(CallError):
    """500: a plugin raised something that its hook does not allow. Other calls are untouched."""

    def __init__(self, plugin: str, hook: str, error: BaseException, what: str = "") -> None:
        #: What went wrong. Of an exception only its type: its text may quote what the call holds.
        self.what = what or type(error).__name__
        super().__init__(500, f"plugin {plugin!r} failed in {hook}: {self.what}")
        self.plugin = plugin
        self.hook = hook


class ShuttingDown(CallError):
    """503: headrace ends, and the call with it."""

    def __init__(self) -> None:
        super().__init__(503, "headrace is shutting down", retry_after=1)


class WorkerLost(CallError):
    """503: the worker went away under the call, or refused it for a reason of its own; another one may serve it."""

    def __init__(self, message: str) -> None:
        super().__init__(503, message, retry_after=1)


class WorkerPaused(WorkerLost):
    """503: the worker's engine refused the call because somebody has paused it. It waits at the gate, it isn't lost."""


#: How vLLM 0.33's text begins when a paused engine refuses a call; its code doesn't come through.
_PAUSED: Final = "Generation is paused"

#: gRPC status of a worker → our HTTP status. What is not here is a 500.
HTTP_STATUS: Final = {
    Status.CANCELLED: 499,
    Status.INVALID_ARGUMENT: 400,
    Status.FAILED_PRECONDITION: 400,
    Status.NOT_FOUND: 404,
    Status.ALREADY_EXISTS: 409,
    Status.RESOURCE_EXHAUSTED: 413,
    Status.OUT_OF_RANGE: 413,
    Status.PERMISSION_DENIED: 403,
    Status.UNAUTHENTICATED: 401,
    Status.UNIMPLEMENTED: 501,
    Status.UNAVAILABLE: 503,
    Status.DEADLINE_EXCEEDED: 504,
}


def from_grpc(error: GRPCError) -> CallError:
    """A worker's gRPC error as ours; its wording is kept, since clients match phrases of it (over-long prompts).

    UNAVAILABLE is a `WorkerLost`: the path may try another worker before it gives up with it.
    """
    message = shorten(error.message or error.status.name)
    if error.status is Status.UNAVAILABLE:
        return _unavailable(message)
    return CallError(HTTP_STATUS.get(error.status, 500), message)


_WORDS: Final = {"invalid_request_error": 400, "json_parse_error": 400, "model_not_found": 404}
_ERRORS: Final = frozenset(status.value for status in HTTPStatus if status >= HTTPStatus.BAD_REQUEST)


class _AnyDetail(msgspec.Struct):
    message: str = ""
    param: str | None = None


class _AnyBody(msgspec.Struct):
    error: _AnyDetail | str = ""


def from_http(status: int, body: bytes) -> CallError:
    """A worker's HTTP error as ours. Both shapes that vLLM uses are read: an error object, and a bare string."""
    try:
        error = msgspec.json.decode(body, type=_AnyBody).error
    except (msgspec.MsgspecError, RecursionError):
        error = body[:500].decode(errors="replace")
    detail = error if isinstance(error, _AnyDetail) else _AnyDetail(error)
    return from_code(status, detail.message or f"the worker answered {status}", param=detail.param)


def from_code(code: int | str, message: str, *, param: str | None = None) -> CallError:
    """A worker's error by the `code` of its body: an HTTP status, or what vLLM up to 0.31 writes instead of one.

    What is no error's status is a 502. 503 is a `WorkerLost`: the path may try another worker before it gives up with it.
    """
    status = _WORDS.get(code, 500) if isinstance(code, str) else code
    message = shorten(message)
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        return _unavailable(message)
    return CallError(status if status in _ERRORS else 502, message, param=param)


def shorten(text: str, length: int = 4096) -> str:
    """A text that others wrote, and that may quote a whole prompt, in a length that a reply and a log line can bear."""
    return text if len(text) <= length else f"{text[:length]}… ({len(text):,} characters)"


def _unavailable(message: str) -> WorkerLost:
    return WorkerPaused(message) if message.startswith(_PAUSED) else WorkerLost(message)
