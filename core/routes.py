"""The routes beside the hottest one, as plugins add them: a handler takes an `HTTPRequest` and gives an `HTTPReply`.

Quart serves them; nobody but this module knows.
"""

from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, cast
from urllib.parse import parse_qsl

import msgspec
import structlog
from msgspec import Struct, field
from quart import Response, request
from quart_trio import QuartTrio
from werkzeug.exceptions import HTTPException, MethodNotAllowed
from werkzeug.routing import RequestRedirect

from core.errors import BadRequest, CallError, ClientGone, NotFound, PluginFault
from core.hookcalls import is_end
from core.northbound.answering import refused_id, send_error
from core.northbound.headers import decode_headers
from core.serving.asgi import ASGIApp, Message, Receive, Scope, Send
from core.serving.client import read_body

log = structlog.stdlib.get_logger()

Method = Literal["GET", "POST", "PUT", "PATCH", "DELETE"]


class HTTPRequest(Struct, frozen=True):
    """A request. `parameters` are those of the path (`/workers/<id>`); header names are in lower case."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes
    parameters: Mapping[str, str]
    #: Of the query, every value of a name that is there more than once; `query` has the first.
    repeated: Mapping[str, list[str]] = field(default_factory=dict[str, list[str]])
    #: The client's address, empty where the server doesn't know it.
    client: str = ""

    def json(self) -> Any:
        """The body as JSON, `None` when it is empty. Raises: `BadRequest`."""
        try:
            return msgspec.json.decode(self.body) if self.body.strip() else None
        except (msgspec.MsgspecError, RecursionError) as error:
            raise BadRequest(f"the body is not JSON: {error}") from error


class HTTPReply(Struct, frozen=True):
    """A response."""

    body: bytes = b""
    status: int = 200
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict[str, str])

    @classmethod
    def json(cls, value: Any, status: int = 200) -> "HTTPReply":
        """`value` as JSON."""
        return cls(msgspec.json.encode(value), status)

    @classmethod
    def error(cls, error: CallError) -> "HTTPReply":
        """vLLM's error body."""
        retry = {} if error.retry_after is None else {"retry-after": str(error.retry_after)}
        return cls(msgspec.json.encode(error.body), error.status, headers=retry)


Handler = Callable[[HTTPRequest], Awaitable[HTTPReply]]


class Exchange(Struct, frozen=True):
    """A request whose answer is written by its handler, piece by piece, over ASGI's `send`. The body was read."""

    request: HTTPRequest
    #: As it was sent, without the question mark.
    query_string: bytes
    #: `1.1`, `2`
    http_version: str
    receive: Receive
    send: Send


StreamHandler = Callable[[Exchange], Awaitable[None]]


class Routes:
    """Where handlers are added; an ASGI application of its own.

    A handler may raise `CallError`, which becomes vLLM's error body. Anything else that it raises is logged, and becomes a 500 that names
    whose fault it is.
    """

    def __init__(self, *, max_body_bytes: int, body_timeout: float = 60.0) -> None:
        self._max_body_bytes = max_body_bytes
        self._body_timeout = body_timeout
        #: The plugin that adds routes now; empty for the core.
        self._owner = ""
        #: With their plugins.
        self._streamed: dict[tuple[str, str], tuple[StreamHandler, str]] = {}
        #: By the name of the route in Quart's map.
        self._handlers: dict[str, Handler] = {}
        self._quart = QuartTrio("headrace")
        # Quart gets bodies that were read; of its own limits one is for the whole of a body, however well it comes.
        self._quart.config["MAX_CONTENT_LENGTH"] = None
        self._quart.config["BODY_TIMEOUT"] = None
        self._quart.register_error_handler(404, _not_found)
        self._quart.register_error_handler(405, _not_allowed)
        self._quart.register_error_handler(HTTPException, _other)
        self._quart.register_error_handler(CallError, _call_error)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One HTTP request. Cancellation: its handler's task is cancelled."""
        headers = decode_headers(scope["headers"])
        try:
            declared = headers.get("content-length")
            body = await read_body(receive, self._max_body_bytes, declared=declared, timeout=self._body_timeout)
        except ClientGone:
            return
        except CallError as error:
            await send_error(send, error, refused_id(headers))
            return
        if streamed := self._streamed.get((scope["method"], scope["path"])):
            await self._stream(*streamed, scope, headers, body, receive, send)
        else:
            # Quart's types know ASGI as closed sets of typed dictionaries; ours are open mappings.
            await cast("ASGIApp", self._quart)(scope, _after(body, receive), send)

    async def _stream(
        self, handler: StreamHandler, owner: str, scope: Scope, headers: Mapping[str, str], body: bytes, receive: Receive, send: Send
    ) -> None:
        begun = False

        async def begin(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            request_ = HTTPRequest(
                method=scope["method"],
                path=scope["path"],
                query=dict(parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)),
                headers=headers,
                body=body,
                parameters={},
            )
            with _blaming(owner, f"{request_.method} {request_.path}"):
                await handler(Exchange(request_, scope["query_string"], scope["http_version"], receive, begin))
        except ClientGone:
            return
        except CallError as error:
            if not begun:  # else the server sees that the answer is not whole, and breaks it off
                await send_error(send, error, refused_id(headers))

    @contextmanager
    def owned_by(self, plugin: str) -> Generator[None, None, None]:
        """The scope in which a plugin adds its routes: what their handlers do wrong is its fault."""
        self._owner = plugin
        try:
            yield
        finally:
            self._owner = ""

    def add_streamed(self, method: Method, path: str, handler: StreamHandler) -> None:
        """Serve `path`, without parameters, by a handler that writes the answer itself.

        A `CallError` that it raises is answered, so it raises none once it has begun to write. It watches the client by itself, as
        `Proxy.relay` does.

        Raises: `ValueError` when somebody serves it already.
        """
        self._check_free(method, path)
        self._streamed[method, path] = handler, self._owner

    def is_served(self, method: Method, path: str) -> bool:
        """Whether somebody serves it."""
        served = {(method_, str(rule)) for rule in self._quart.url_map.iter_rules() for method_ in rule.methods or ()}
        return (method, path) in served or (method, path) in self._streamed

    def _check_free(self, method: Method, path: str) -> None:
        if self.is_served(method, path):
            raise ValueError(f"{method} {path} is served already")

    def add(self, method: Method, path: str, handler: Handler) -> None:
        """Serve `path` (`/workers/<id>` has a parameter `id`) by `handler`.

        Raises: `ValueError` when somebody serves it already.
        """
        self._check_free(method, path)
        owner = self._owner

        async def handle(request_: HTTPRequest) -> HTTPReply:
            with _blaming(owner, f"{method} {path}"):
                return await handler(request_)

        async def view(**parameters: str) -> Response:
            return _response(
                await handle(
                    HTTPRequest(
                        method=request.method,
                        path=request.path,
                        query=request.args.to_dict(),
                        headers={name.lower(): value for name, value in request.headers.items()},
                        body=cast("bytes", await request.get_data(cache=False)),
                        parameters=parameters,
                        repeated=request.args.to_dict(flat=False),
                        client=request.remote_addr or "",
                    )
                )
            )

        self._handlers[f"{method} {path}"] = handle
        self._quart.add_url_rule(path, f"{method} {path}", view, methods=[method], provide_automatic_options=False)

    async def ask(self, request: HTTPRequest) -> HTTPReply:
        """What the route of this request answers, without a connection: for dialects, which say in other words what a route does.

        Cancellation: as its handler's.
        Raises: what the handler raises; `NotFound` when nobody serves it, or by a handler that writes its answer itself.
        """
        try:
            name, parameters = self._quart.url_map.bind("localhost").match(request.path, request.method)
        except (HTTPException, RequestRedirect):
            name, parameters = "", {}
        if (handler := self._handlers.get(name)) is None:
            raise NotFound(f"there is no route {request.method} {request.path}")
        return await handler(msgspec.structs.replace(request, parameters=parameters))


@contextmanager
def _blaming(plugin: str, route: str) -> Generator[None, None, None]:
    """The scope of a handler: what it raises beside `CallError` is the plugin's fault, or headrace's own."""
    try:
        yield
    except CallError:
        raise
    except BaseException as error:
        if is_end(error):
            raise
        log.exception("route.failed", route=route, plugin=plugin)
        fault = PluginFault(plugin, route, error) if plugin else CallError(500, f"{route}: a fault of headrace: {type(error).__name__}")
        raise fault from error


def _after(body: bytes, receive: Receive) -> Receive:
    """`receive` with this body before it."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        return messages.pop() if messages else await receive()

    return next_message


def _response(reply: HTTPReply) -> Response:
    return Response(reply.body, reply.status, {"content-type": reply.content_type, **reply.headers})


def _error(error: CallError) -> Response:
    return _response(HTTPReply.error(error))


async def _call_error(error: Exception) -> Response:
    assert isinstance(error, CallError)
    return _error(error)


async def _not_found(_: Exception) -> Response:
    path = request.scope["path"]  # as it was asked: Quart takes slashes off
    return _error(NotFound(f"there is no route {request.method} {path}"))


async def _not_allowed(error: Exception) -> Response:
    response = _error(CallError(405, f"{request.path} is not served for {request.method}"))
    assert isinstance(error, MethodNotAllowed)
    response.headers["allow"] = ", ".join(sorted(error.valid_methods or ()))
    return response


async def _other(error: Exception) -> Response:
    """Whatever else Quart answers."""
    assert isinstance(error, HTTPException)
    return _error(CallError(error.code or 500, f"{request.path}: {error.name}"))
