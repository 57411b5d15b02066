"""Models and adapters, health, version, metrics."""

import time
from collections.abc import Sequence

import msgspec
from quart import Blueprint, Response, request

from plugins.stand_in.engine.engine import Engine
from plugins.stand_in.engine.rank import Rank
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
        return json_response({"server_load": sum(sum(engine.scheduler.counts(rank.number)) for rank in engine.ranks)})

    @blueprint.get("/kv_event_sources")
    async def kv_event_sources() -> Response:
        published = {str(rank.number): msgspec.to_builtins(rank.kv_events) for rank in engine.ranks if rank.kv_events}
        return json_response(published)

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
    """Each family with a series for each rank."""
    series = [_series(engine, rank) for rank in engine.ranks]
    lines: list[str] = []
    for families in zip(*series, strict=True):
        name, kind, _, _ = families[0]
        lines.append(f"# TYPE {name} {kind}\n")
        for rank, (_, _, suffix, value) in zip(engine.ranks, families, strict=True):
            lines.append(f'{name}{suffix}{{model_name="{engine.options.names[0]}",engine="{rank.number}"}} {value}\n')
    return "".join(lines) + "# EOF\n"


def _series(engine: Engine, rank: Rank) -> Sequence[tuple[str, str, str, float]]:
    running, waiting = engine.scheduler.counts(rank.number)
    return (
        ("vllm:num_requests_running", "gauge", "", running),
        ("vllm:num_requests_waiting", "gauge", "", waiting),
        ("vllm:kv_cache_usage_perc", "gauge", "", rank.handoffs.blocks / max(engine.options.cache_blocks, 1)),
        ("vllm:nixl_num_kv_expired_reqs", "counter", "_total", rank.handoffs.expired),
        ("vllm:prompt_tokens", "counter", "_total", rank.prompt_tokens),
        ("vllm:generation_tokens", "counter", "_total", rank.output_tokens),
        ("vllm:prefix_cache_queries", "counter", "_total", rank.prefix_cache.queries),
        ("vllm:prefix_cache_hits", "counter", "_total", rank.prefix_cache.hits),
    )
