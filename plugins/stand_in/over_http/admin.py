"""The routes that vLLM serves under `VLLM_SERVER_DEV_MODE=1`: pausing, sleeping, weights, caches.

Unlike the gRPC service they take no lock, and do not look whether weight transfer or sleep mode is configured: the engine says so.
"""

from typing import Any

import msgspec
from quart import Blueprint, Response, request

from plugins.stand_in.engine.engine import Engine
from plugins.stand_in.engine.refusal import invalid
from plugins.stand_in.engine.scheduler import PauseMode
from plugins.stand_in.over_http.errors import empty_response, json_response, read_json


class AbortRequests(msgspec.Struct):
    """Body of `/abort_requests`: no ids, or an empty list, mean all calls."""

    request_ids: list[str] | None = None


class CollectiveRpc(msgspec.Struct):
    """Body of `/collective_rpc`."""

    method: str | None = None
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    timeout: float | None = None


def routes(engine: Engine) -> Blueprint:
    """Scheduling, caches, and methods of the worker."""
    blueprint = Blueprint("admin", __name__)

    @blueprint.post("/pause")
    async def pause() -> Response:
        await engine.pause(_mode(), clear_cache=_flag("clear_cache", default=True))
        return json_response({"status": "paused"})

    @blueprint.post("/resume")
    async def resume() -> Response:
        with engine.utility("resume"):
            engine.scheduler.resume()
        return json_response({"status": "resumed"})

    @blueprint.get("/is_paused")
    async def is_paused() -> Response:
        with engine.utility("is_paused"):
            return json_response({"is_paused": engine.scheduler.paused})

    @blueprint.post("/sleep")
    async def sleep() -> Response:
        level = request.args.get("level", "1")
        if level not in {"0", "1", "2"}:
            raise invalid("level must be 0, 1 or 2", param="level")
        await engine.sleep(int(level), _mode())
        return json_response({"status": "sleeping", "level": int(level)})

    @blueprint.post("/wake_up")
    async def wake_up() -> Response:
        tags = request.args.getlist("tags")
        engine.wake_up(tags)
        status = "sleeping" if engine.scheduler.asleep else "awake"
        return json_response({"status": status, "tags": tags or None})

    @blueprint.get("/is_sleeping")
    async def is_sleeping() -> Response:
        with engine.utility("is_sleeping"):
            return json_response({"is_sleeping": engine.scheduler.sleeping})

    @blueprint.post("/abort_requests")
    async def abort_requests() -> Response:
        ids = (await read_json(request, AbortRequests)).request_ids
        engine.scheduler.abort(set(ids) if ids else None)
        return empty_response()

    @blueprint.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> Response:
        with engine.utility("reset_prefix_cache"):
            engine.clear_prefix_caches()
        return json_response({"success": True})

    @blueprint.post("/reset_mm_cache")
    @blueprint.post("/reset_encoder_cache")
    async def reset_nothing() -> Response:
        return empty_response()

    @blueprint.get("/get_world_size")
    async def get_world_size() -> Response:
        ranks = len(engine.ranks) if _flag("include_dp", default=True) else 1
        return json_response({"world_size": ranks * engine.options.world_size})

    @blueprint.post("/collective_rpc")
    async def collective_rpc() -> Response:
        body = await read_json(request, CollectiveRpc)
        if body.method is None:
            raise invalid("Missing 'method' in request body", param="method")
        with engine.utility("collective_rpc"):
            if body.method != "reload_weights":
                raise ValueError(f"the worker has no method {body.method!r}; the stand-in knows reload_weights")
            path = body.kwargs.get("weights_path", body.args[0] if body.args else None)
            engine.weights.reload(path)
        return json_response({"results": [None] * len(engine.ranks) * engine.options.world_size})

    return blueprint


def _mode() -> PauseMode:
    mode = request.args.get("mode", "abort")
    try:
        return PauseMode(mode)
    except ValueError:
        raise invalid(f"mode: invalid pause mode `{mode}`; expected abort, wait or keep", param="mode") from None


def _flag(name: str, *, default: bool) -> bool:
    value = request.args.get(name, str(default).lower())
    if value not in {"true", "false"}:
        raise invalid(f"{name}: `{value}` is neither `true` nor `false`", param=name)
    return value == "true"
