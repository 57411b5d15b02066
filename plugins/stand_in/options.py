"""What a stand-in worker can be told when it starts."""

from dataclasses import dataclass, field
from uuid import uuid4

from plugins.stand_in.engine.encoder import ECTransferConfig
from plugins.stand_in.kv_events import KVEventsConfig

#: The vLLM version whose behaviour the stand-in keeps, marked so that nobody takes it for the real one.
ENGINE_VERSION = "0.33.0+stand.in"

#: The vllm-rs server whose form the HTTP routes have.
FRONTEND_VERSION = "0.33.0"

#: `ServerInfo.proto_version`: the version of vLLM's own protocol crate.
PROTO_VERSION = "0.6.0"


@dataclass(frozen=True, kw_only=True)
class Options:
    """The stand-in's command line, typed; the defaults are those of `python -m plugins.stand_in`.

    Lengths are tokens, times are seconds.
    """

    host: str = "127.0.0.1"
    grpc_port: int = 0  #: 0: any free port
    http_port: int = 0  #: 0: any free port
    side_channel_port: int = 0  #: where KV blocks are handed over; 0: any free port
    model: str = "stand-in"  #: `ModelInfo.model_id`
    served_model_names: tuple[str, ...] = ()  #: the first is the name, the others are aliases; empty: `model`
    max_model_len: int = 32768
    vocab_size: int = 32000
    eos_token_id: int = 256  #: the first id that is not a byte
    max_logprobs: int = 20  #: -1: no limit
    data_parallel_size: int = 1  #: engines of one model, each with a prefix cache and KV events of its own
    world_size: int = 1  #: GPUs of each of these engines; a collective rpc returns a result for each
    block_size: int = 16  #: of the prefix cache
    cache_blocks: int = 16384  #: kept in the prefix cache; the least recently used goes first
    enable_lora: bool = True
    enable_media: bool = False  #: accept images, videos and sounds, prepared
    ec_transfer: ECTransferConfig | None = None  #: who looks at them
    enable_sleep_mode: bool = True
    weight_transfer_backend: str = "nccl"  #: empty: none, and the weight calls are refused
    kv_events: KVEventsConfig | None = None  #: where they are published
    kv_lease: float = 30.0  #: how long a prefill keeps its blocks for a decode that doesn't come
    kv_transfer_delay: float = 0.0  #: how long a decode takes to get them
    token_delay: float = 0.0  #: before each token of each call
    stream_interval: int = 1  #: tokens per streamed message, after the first
    shutdown_timeout: float = 0.0  #: how long running calls may go on after SIGTERM
    exit_with_parent: bool = False  #: end when stdin closes
    instance_id: str = field(default_factory=lambda: str(uuid4()))

    @property
    def names(self) -> tuple[str, ...]:
        """The names under which the base model is served, at least one."""
        return self.served_model_names or (self.model,)
