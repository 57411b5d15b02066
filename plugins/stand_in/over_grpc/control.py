"""`vllm.Control`: administration. What each rpc does is said in proto/vllm/control.proto."""

# ruff: noqa: D102, ARG002 (the methods are the rpcs, with the arguments that the generated base gives them)

import asyncio
import json
from collections.abc import Callable
from typing import Any

from core.wire.generated import vllm
from plugins.stand_in.engine.adapters import Adapter
from plugins.stand_in.engine.engine import Engine
from plugins.stand_in.engine.refusal import Problem, Refused, invalid
from plugins.stand_in.engine.scheduler import PauseMode
from plugins.stand_in.kv_events import KVEventsConfig
from plugins.stand_in.options import ENGINE_VERSION, PROTO_VERSION

_MODES = {
    vllm.PauseMode.UNSPECIFIED: PauseMode.ABORT,
    vllm.PauseMode.ABORT: PauseMode.ABORT,
    vllm.PauseMode.WAIT: PauseMode.WAIT,
    vllm.PauseMode.KEEP: PauseMode.KEEP,
}


class Control(vllm.ControlBase):
    """The service. `shut_down` is called when a client asks the server to end.

    As in vLLM 0.33 one lock serialises everything that changes scheduling or weights, so a pause that waits holds up a resume.
    """

    def __init__(self, engine: Engine, shut_down: Callable[[], None]) -> None:
        self._engine = engine
        self._shut_down = shut_down
        self._lock = asyncio.Lock()

    async def get_server_info(self, message: vllm.GetServerInfoRequest) -> vllm.ServerInfo:
        options = self._engine.options
        return vllm.ServerInfo(
            engine_version=ENGINE_VERSION,
            api_version="vllm",
            instance_id=options.instance_id,
            parallelism=vllm.ParallelismInfo(
                tensor_parallel_size=options.world_size,
                pipeline_parallel_size=1,
                data_parallel_size=options.data_parallel_size,
                decode_context_parallel_size=1,
                world_size=options.world_size,
                data_parallel_size_local=options.data_parallel_size,
            ),
            max_model_len=options.max_model_len,
            kv_block_size=options.block_size,
            total_kv_blocks=options.data_parallel_size * options.cache_blocks,
            max_running_requests=256,
            max_batched_tokens=8192,
            max_loras=1 if options.enable_lora else 0,
            rl_capabilities=vllm.RlCapabilities(
                weight_transfer_enabled=bool(options.weight_transfer_backend),
                weight_transfer_backend=options.weight_transfer_backend,
                sleep_mode_enabled=options.enable_sleep_mode,
            ),
            proto_version=PROTO_VERSION,
            effective_attention_block_size=options.block_size,
        )

    async def get_model_info(self, message: vllm.GetModelInfoRequest) -> vllm.ModelInfo:
        options = self._engine.options
        return vllm.ModelInfo(
            model_id=options.model,
            served_model_name=options.names[0],
            served_model_aliases=list(options.names[1:]),
            supports_text_input=True,
            supports_token_ids_input=True,
            supports_lora=options.enable_lora,
            supports_multimodal=options.enable_media,
        )

    async def get_kv_event_sources(self, message: vllm.GetKvEventSourcesRequest) -> vllm.GetKvEventSourcesResponse:
        sources = [_source(rank.number, rank.kv_events) for rank in self._engine.ranks if rank.kv_events]
        return vllm.GetKvEventSourcesResponse(sources=sources)

    async def abort(self, message: vllm.AbortRequest) -> vllm.AbortResponse:
        self._engine.scheduler.abort(set(message.request_ids))
        return vllm.AbortResponse()

    async def shutdown(self, message: vllm.ShutdownRequest) -> vllm.ShutdownResponse:
        self._shut_down()
        return vllm.ShutdownResponse()

    async def pause_generation(self, message: vllm.PauseGenerationRequest) -> vllm.PauseGenerationResponse:
        mode = _mode(message.mode)
        async with self._lock:
            await self._engine.pause(mode, clear_cache=message.clear_cache is not False)
        return vllm.PauseGenerationResponse()

    async def resume_generation(self, message: vllm.ResumeGenerationRequest) -> vllm.ResumeGenerationResponse:
        async with self._lock:
            with self._engine.utility("resume_generation"):
                self._engine.scheduler.resume()
        return vllm.ResumeGenerationResponse()

    async def is_paused(self, message: vllm.IsPausedRequest) -> vllm.IsPausedResponse:
        with self._engine.utility("is_paused"):
            return vllm.IsPausedResponse(paused=self._engine.scheduler.paused)

    async def sleep(self, message: vllm.SleepRequest) -> vllm.SleepResponse:
        self._demand_sleep_mode()
        mode = _mode(message.mode)
        async with self._lock:
            await self._engine.sleep(1 if message.level is None else message.level, mode)
        return vllm.SleepResponse()

    async def wake_up(self, message: vllm.WakeUpRequest) -> vllm.WakeUpResponse:
        self._demand_sleep_mode()
        async with self._lock:
            self._engine.wake_up(message.tags)
        return vllm.WakeUpResponse()

    async def is_sleeping(self, message: vllm.IsSleepingRequest) -> vllm.IsSleepingResponse:
        with self._engine.utility("is_sleeping"):
            return vllm.IsSleepingResponse(sleeping=self._engine.scheduler.sleeping)

    async def init_weight_transfer_engine(self, message: vllm.InitWeightTransferEngineRequest) -> vllm.InitWeightTransferEngineResponse:
        self._demand_transfer()
        info = _json_object("init_info_json", message.init_info_json)
        async with self._lock:
            with self._engine.utility("init_weight_transfer_engine"):
                self._engine.weights.init_transfer(info)
        return vllm.InitWeightTransferEngineResponse()

    async def start_weight_update(self, message: vllm.StartWeightUpdateRequest) -> vllm.StartWeightUpdateResponse:
        self._demand_transfer()
        async with self._lock:
            with self._engine.utility("start_weight_update"):
                self._engine.weights.start()
        return vllm.StartWeightUpdateResponse()

    async def start_draft_weight_update(self, message: vllm.StartDraftWeightUpdateRequest) -> vllm.StartDraftWeightUpdateResponse:
        raise Refused(Problem.PRECONDITION, "draft weight updates need a speculative draft model, and there is none")

    async def update_weights(self, message: vllm.UpdateWeightsRequest) -> vllm.UpdateWeightsResponse:
        self._demand_transfer()
        info = _json_object("update_info_json", message.update_info_json)
        async with self._lock:
            with self._engine.utility("update_weights"):
                self._engine.weights.update(info)
        return vllm.UpdateWeightsResponse()

    async def finish_weight_update(self, message: vllm.FinishWeightUpdateRequest) -> vllm.FinishWeightUpdateResponse:
        self._demand_transfer()
        if message.weight_version is not None:
            _demand_version(message.weight_version)
        async with self._lock:
            with self._engine.utility("finish_weight_update"):
                self._engine.weights.finish(message.weight_version)
        return vllm.FinishWeightUpdateResponse()

    async def update_weight_version(self, message: vllm.UpdateWeightVersionRequest) -> vllm.UpdateWeightVersionResponse:
        _demand_version(message.weight_version)
        async with self._lock:
            with self._engine.utility("update_weight_version"):
                self._engine.weights.version = message.weight_version
        return vllm.UpdateWeightVersionResponse()

    async def get_weight_version(self, message: vllm.GetWeightVersionRequest) -> vllm.GetWeightVersionResponse:
        with self._engine.utility("get_weight_version"):
            return vllm.GetWeightVersionResponse(weight_version=self._engine.weights.version)

    async def load_lora(self, message: vllm.LoadLoraRequest) -> vllm.LoadLoraResponse:
        with self._engine.utility("load_lora"):
            adapter = self._engine.adapters.load(message.lora_name, message.source_path)
        return vllm.LoadLoraResponse(adapter=_adapter(adapter))

    async def unload_lora(self, message: vllm.UnloadLoraRequest) -> vllm.UnloadLoraResponse:
        with self._engine.utility("unload_lora"):
            return vllm.UnloadLoraResponse(adapter=_adapter(self._engine.adapters.unload(message.lora_name)))

    async def list_loras(self, message: vllm.ListLorasRequest) -> vllm.ListLorasResponse:
        return vllm.ListLorasResponse(adapters=[_adapter(adapter) for adapter in self._engine.adapters.list()])

    def _demand_sleep_mode(self) -> None:
        if not self._engine.options.enable_sleep_mode:
            raise Refused(Problem.PRECONDITION, "sleep mode is not enabled: start the worker with --enable-sleep-mode")

    def _demand_transfer(self) -> None:
        if not self._engine.options.weight_transfer_backend:
            raise Refused(Problem.PRECONDITION, "weight transfer is not enabled: start the worker with --weight-transfer-backend")


def _source(rank: int, config: KVEventsConfig) -> vllm.KvEventSource:
    return vllm.KvEventSource(
        transport=config.publisher,
        endpoint=config.endpoint,
        topic=config.topic,
        replay_endpoint=config.replay_endpoint or "",
        data_parallel_rank=rank,
        encoding="msgpack",
        schema_version=1,
        buffer_steps=config.buffer_steps,
        hwm=config.hwm,
        max_queue_size=config.max_queue_size,
    )


def _mode(mode: vllm.PauseMode) -> PauseMode:
    if mode not in _MODES:
        raise invalid("invalid pause mode")
    return _MODES[mode]


def _json_object(field: str, data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError as error:
        raise invalid(f"{field} must contain valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise invalid(f"{field} must contain a JSON object")
    return value


def _demand_version(version: str) -> None:
    if not version.strip():
        raise invalid("weight_version must not be empty")


def _adapter(adapter: Adapter) -> vllm.LoraAdapter:
    return vllm.LoraAdapter(lora_id=adapter.id, lora_name=adapter.name, source_path=adapter.path)
