"""The Quart application: all routes, and errors in vLLM's form."""

from quart import Quart, Response, request
from werkzeug.exceptions import HTTPException

from plugins.stand_in.engine.engine import Engine
from plugins.stand_in.engine.refusal import Refused
from plugins.stand_in.over_http import admin, generate, models, weights
from plugins.stand_in.over_http.errors import Malformed, empty_response, error_body, json_response, refused_body

#: A larger body is refused (vLLM 0.33, `VLLM_HTTP_MAX_REQUEST_BODY_SIZE`).
MAX_BODY_BYTES = 32 * 1024 * 1024
#: vLLM's routes that take or give text. A client's first call may be one of these, and should learn why nothing answers.
_TEXT_ROUTES = (
    *("/v1/chat/completions", "/v1/chat/completions/render", "/v1/completions", "/v1/responses", "/v1/embeddings"),
    *("/tokenize", "/detokenize"),
)


def create_app(engine: Engine) -> Quart:
    """The application for one engine. It has vLLM's scale-out, development and run-time LoRA routes, with no key."""
    app = Quart(__name__)
    app.config["MAX_CONTENT_LENGTH"] = MAX_BODY_BYTES
    for routes in (generate.routes, models.routes, admin.routes, weights.routes):
        app.register_blueprint(routes(engine))

    @app.before_request
    async def read_all() -> None:
        # An answer before the body has come makes hypercorn close the connection, and the next request on it fails.
        await request.get_data()

    @app.errorhandler(Refused)
    async def refused(error: Refused) -> Response:
        return json_response(*refused_body(error))

    @app.errorhandler(Malformed)
    async def malformed(error: Malformed) -> Response:
        return json_response(error_body(str(error), "Bad Request", 400), 400)

    @app.errorhandler(HTTPException)
    async def unknown(error: HTTPException) -> Response:
        return empty_response(error.code or 500)

    @app.post("/inference/v1/abort_requests")
    async def not_in_rust() -> Response:
        message = "abort_requests is not supported here, as in vllm-rs 0.33.0: use /abort_requests"
        return json_response(error_body(message, "NotImplementedError", 501), 501)

    async def no_text() -> Response:
        message = (
            f"the stand-in has no model and answers in tokens only: use /inference/v1/generate, or put a vLLM server's `http` "
            f"into headrace.toml for {request.path}"
        )
        return json_response(error_body(message, "NotImplementedError", 501), 501)

    for path in _TEXT_ROUTES:
        app.add_url_rule(path, path, no_text, methods=["POST"])

    return app
