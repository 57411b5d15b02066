"""How one scripted engine is set up; every field is a command-line flag of the same name."""

from dataclasses import dataclass
from typing import Any

from tests.workers.scripted_engine.kv_events import at_rank
from tests.workers.tiny_model import MAX_MODEL_LEN, VOCAB_SIZE


@dataclass(frozen=True)
class Settings:
    """One scripted engine."""

    max_model_len: int = MAX_MODEL_LEN
    vocab_size: int = VOCAB_SIZE
    block_size: int = 16
    num_blocks: int = 4096
    max_num_seqs: int = 256
    #: GPUs of this engine, and so the number of `collective_rpc` results
    world_size: int = 1
    data_parallel_size: int = 1
    rank: int = 0
    lora: bool = True
    max_loras: int = 4
    #: name of the weight-transfer backend, or nothing for an engine without weight transfer
    weight_transfer: str = "nccl"
    sleep: bool = True
    #: where rank 0 says that it publishes KV events, or nothing for an engine that publishes none
    kv_events: str = ""
    #: where rank 0 replays them; only with it an engine really publishes
    kv_replay: str = ""
    #: as `--enable-return-routed-experts`: rows for every request
    routed_experts: bool = False
    #: an encode worker: it looks at media and makes no token, see `encoding`
    encodes: bool = False
    #: the least time between two outputs of one request
    step_seconds: float = 0.0
    #: tokens in one output of a request without special behaviour, stop ids in its output or routed experts
    tokens_per_step: int = 1
    #: for load tests: no prefix cache, and outputs start at few places in the token table
    fast: bool = False

    @property
    def instance_id(self) -> str:
        """The engine's name for itself in `ServerInfo`."""
        return f"scripted-{self.rank}"

    def ready_response(self) -> dict[str, Any]:
        """What the engine tells its front end about itself at the start."""
        return {
            "max_model_len": self.max_model_len,
            "num_gpu_blocks": self.num_blocks,
            "block_size": self.block_size,
            "dp_stats_address": None,
            "dtype": "float32",
            "vllm_version": "0.33.0+scripted",
            "world_size": self.world_size,
            "data_parallel_size": self.data_parallel_size,
            "tensor_parallel_size": self.world_size,
            "pipeline_parallel_size": 1,
            "decode_context_parallel_size": 1,
            "data_parallel_rank": self.rank,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_model_len,
            "instance_id": self.instance_id,
            "supports_lora": self.lora,
            "max_loras": self.max_loras if self.lora else 0,
            "kv_cache_size_tokens": self.num_blocks * self.block_size,
            "kv_cache_max_concurrency": self.num_blocks * self.block_size / self.max_model_len,
            "kv_events_config": self.kv_events_config(),
            "weight_transfer_backend": self.weight_transfer or None,
            "enable_sleep_mode": self.sleep,
            "supports_draft_weight_updates": False,
            "effective_attention_block_size": self.block_size,
        }

    def kv_events_config(self) -> dict[str, Any] | None:
        """Where this rank publishes KV events, or says so."""
        if not self.kv_events:
            return None
        replay = self.kv_replay or f"{self.kv_events}0"
        where = {"endpoint": at_rank(self.kv_events, self.rank), "replay_endpoint": at_rank(replay, self.rank), "topic": "kv"}
        return {"enable_kv_cache_events": True, "publisher": "zmq", **where, "buffer_steps": 1000, "hwm": 2000, "max_queue_size": 3000}
