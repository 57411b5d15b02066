"""The routes of a weight update."""

from typing import Any

import msgspec
from quart import Blueprint, Response, request

from plugins.stand_in.engine.engine import Engine
from plugins.stand_in.engine.refusal import invalid
from plugins.stand_in.over_http.errors import json_response, read_json, read_json_if_any


class InitTransfer(msgspec.Struct):
    """Body of `/init_weight_transfer_engine`."""

    init_info: Any = None


class UpdateWeights(msgspec.Struct):
    """Body of `/update_weights`: one object for all ranks, or a list with one for each."""

    update_info: Any = None


class FinishUpdate(msgspec.Struct):
    """Body of `/finish_weight_update`; over HTTP a blank version is taken as it is."""

    weight_version: str | None = None


class UpdateVersion(msgspec.Struct):
    """Body of `/update_weight_version`."""

    new_version: str


def routes(engine: Engine) -> Blueprint:
    """The steps of an update, in their order, and the version label."""
    blueprint = Blueprint("weights", __name__)

    @blueprint.post("/init_weight_transfer_engine")
    async def init_weight_transfer_engine() -> Response:
        info = (await read_json(request, InitTransfer)).init_info
        if not isinstance(info, dict):
            raise invalid("'init_info' must be a JSON object", param="init_info")
        with engine.utility("init_weight_transfer_engine"):
            engine.weights.init_transfer(info)
        return json_response({"message": "Weight transfer initialized"})

    @blueprint.post("/shutdown_weight_transfer_engine")
    async def shutdown_weight_transfer_engine() -> Response:
        with engine.utility("shutdown_weight_transfer_engine"):
            engine.weights.shut_down_transfer()
        return json_response({"message": "Weight transfer shut down"})

    @blueprint.post("/start_weight_update")
    async def start_weight_update() -> Response:
        with engine.utility("start_weight_update"):
            engine.weights.start()
        return json_response({"message": "Weight update started"})

    @blueprint.post("/start_draft_weight_update")
    async def start_draft_weight_update() -> Response:
        with engine.utility("start_draft_weight_update"):
            raise ValueError("there is no speculative draft model")

    @blueprint.post("/update_weights")
    async def update_weights() -> Response:
        info = (await read_json(request, UpdateWeights)).update_info
        if not (isinstance(info, dict) or (isinstance(info, list) and all(isinstance(one, dict) for one in info))):
            raise invalid("'update_info' must be a JSON object or a list of per-worker JSON objects", param="update_info")
        with engine.utility("update_weights"):
            engine.weights.update(info)
        return json_response({"message": "Weights updated"})

    @blueprint.post("/finish_weight_update")
    async def finish_weight_update() -> Response:
        version = (await read_json_if_any(request, FinishUpdate)).weight_version
        with engine.utility("finish_weight_update"):
            engine.weights.finish(version)
        return json_response({"message": "Weight update finished"})

    @blueprint.post("/update_weight_version")
    async def update_weight_version() -> Response:
        version = (await read_json(request, UpdateVersion)).new_version
        with engine.utility("update_weight_version"):
            engine.weights.version = version
        return json_response({"success": True, "new_version": version})

    @blueprint.get("/weight_info")
    async def weight_info() -> Response:
        with engine.utility("get_weight_version"):
            return json_response({"weight_version": engine.weights.version})

    return blueprint
