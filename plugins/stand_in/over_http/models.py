"""Models and adapters, health, version, metrics."""

import time

import msgspec
from quart import Blueprint, Response, request

from plugins.stand_in.engine.engine import Engine
from plugins.stand_in.engine.refusal import Problem, Refused, invalid
from plugins.stand_in.options import ENGINE_VERSION, FRONTEND_VERSION
from plugins.stand_in.over_http.errors import empty_response, json_response, read_json


class LoadAdapter(msgspec.Struct):
    """Body of `/v1/load_lora_adapter`."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadAdapter(msgspec.Struct):
    """Body of `/v1/unload_lora_adapter`."""

    lora_name: str
    lora_int_id: int | None = None


def routes(engine: Engine) -> Blueprint:
    """Everything that is not generation and not administration of the engine."""
    blueprint = Blueprint("models", __name__)

    @blueprint.get("/health")
    async def health() -> Response:
        return empty_response(503 if engine.scheduler.dead else 200)

    @blueprint.get("/version")
    async def version() -> Response:
        return json_response({"version": ENGINE_VERSION, "rust_frontend_version": FRONTEND_VERSION})

    @blueprint.get("/load")
    async def load() -> Response:
        return json_response({"server_load": sum(engine.scheduler.counts)})

    @blueprint.get("/kv_event_sources")
    async def kv_event_sources() -> Response:
        return json_response({"0": msgspec.to_builtins(engine.kv_events)} if engine.kv_events else {})

    @blueprint.get("/metrics")
    async def metrics() -> Response:
        return Response(_metrics(engine), content_type="application/openmetrics-text; version=1.0.0; charset=utf-8")

    @blueprint.get("/v1/models")
    async def models() -> Response:
        options = engine.options
        cards = [_card(name, options.model, None, options.max_model_len) for name in options.names]
        if options.enable_lora:
            cards += [_card(adapter.name, adapter.path, options.names[0], None) for adapter in engine.adapters.list()]
        return json_response({"object": "list", "data": cards})

    @blueprint.post("/v1/load_lora_adapter")
    async def load_lora_adapter() -> Response:
        body = await read_json(request, LoadAdapter)
        with engine.utility("load_lora"):
            engine.adapters.load(body.lora_name, body.lora_path, in_place=body.load_inplace)
        return _success(f"LoRA adapter '{body.lora_name}' added successfully.")

    @blueprint.post("/v1/unload_lora_adapter")
    async def unload_lora_adapter() -> Response:
        body = await read_json(request, UnloadAdapter)
        adapter = engine.adapters.find(body.lora_name)
        if body.lora_name.strip() and adapter is None:
            raise Refused(Problem.NOT_FOUND, f"The model `{body.lora_name}` does not exist.", param="model")
        if adapter is not None and body.lora_int_id not in {None, adapter.id}:
            raise invalid(f"lora_int_id {body.lora_int_id} is not that of `{adapter.name}`, {adapter.id}", param="lora_int_id")
        with engine.utility("unload_lora"):
            engine.adapters.unload(body.lora_name)
        return _success(f"LoRA adapter '{body.lora_name}' removed successfully.")

    return blueprint


def _card(name: str, root: str, parent: str | None, max_model_len: int | None) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "headrace-stand-in",
        "root": root,
        "parent": parent,
        "max_model_len": max_model_len,
    }


def _success(text: str) -> Response:
    return Response(f"Success: {text}", content_type="text/plain; charset=utf-8")


def _metrics(engine: Engine) -> str:
    running, waiting = engine.scheduler.counts
    labels = f'{{model_name="{engine.options.names[0]}",engine="0"}}'
    families = (
        ("vllm:num_requests_running", "gauge", "", running),
        ("vllm:num_requests_waiting", "gauge", "", waiting),
        ("vllm:kv_cache_usage_perc", "gauge", "", engine.handoffs.blocks / max(engine.options.cache_blocks, 1)),
        ("vllm:nixl_num_kv_expired_reqs", "counter", "_total", engine.handoffs.expired),
        ("vllm:prompt_tokens", "counter", "_total", engine.prompt_tokens),
        ("vllm:generation_tokens", "counter", "_total", engine.output_tokens),
        ("vllm:prefix_cache_queries", "counter", "_total", engine.prefix_cache.queries),
        ("vllm:prefix_cache_hits", "counter", "_total", engine.prefix_cache.hits),
    )
    lines = [f"# TYPE {name} {kind}\n{name}{suffix}{labels} {value}\n" for name, kind, suffix, value in families]
    return "".join(lines) + "# EOF\n"
