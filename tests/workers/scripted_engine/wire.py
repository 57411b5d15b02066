"""What travels between a `vllm-rs` front end and its engine: MessagePack over ZMQ, as vLLM 0.33 lays it out.

The structs are positional arrays, or maps, with exactly the fields that a scripted engine reads or sets. Trailing fields at their
default may be left out on this wire, and fields that we don't know are skipped.
"""

import array
import math
import time
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Any, Final

import msgspec
import zmq
from msgspec import msgpack

_RAW_TENSOR: Final = 3
_DEATH_SENTINEL: Final = b"ENGINE_CORE_DEAD"


class Kind(IntEnum):
    """The first frame of a message to the engine."""

    ADD = 0
    ABORT = 1
    UTILITY = 3


class Finish(IntEnum):
    """Why a request ended."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4


class Sampling(msgspec.Struct):
    """The part of `SamplingParams` that matters to a scripted engine; the defaults are vLLM's."""

    temperature: float = 1.0
    seed: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: list[int] | None = None
    eos_token_id: int | None = msgspec.field(default=None, name="_eos_token_id")
    logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    #: an encoded array on the wire, rows of ids in what `Link.receive` yields
    prompt_logprob_token_ids: Any = None
    prompt_logprob_start: int | None = None
    routed_experts_prompt_start: int = 0
    skip_reading_prefix_cache: bool = False
    extra_args: dict[str, Any] | None = None


class Request(msgspec.Struct, array_like=True):
    """`EngineCoreRequest`, up to the adapter and the salt."""

    request_id: str
    prompt_token_ids: list[int]
    mm_features: Any
    sampling: Sampling
    pooling: Any
    arrival_time: float
    lora: list[Any] | None
    cache_salt: str | None


class PrefillStats(msgspec.Struct):
    """How much of a prompt came from the prefix cache, in tokens."""

    num_prompt_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    num_local_cached_tokens: int
    num_external_cached_tokens: int = 0
    num_cache_creation_tokens: int = 0


class RequestError(msgspec.Struct):
    """A typed error that ends one request and leaves the engine healthy."""

    code: str
    message: str
    retryable: bool = False


class Output(msgspec.Struct, array_like=True, gc=False):
    """`EngineCoreOutput`: what one step gave one request."""

    request_id: str
    token_ids: msgspec.Raw | list[int]
    logprobs: msgspec.Raw | None = None
    prompt_logprobs: msgspec.Raw | None = None
    pooling: None = None
    finish: Finish | None = None
    stop_reason: int | str | None = None
    events: None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    trace_headers: None = None
    prefill: PrefillStats | None = None
    routed_experts: Sequence[Any] | None = None
    nans: int = 0
    mm_cache_misses: None = None
    sampling_mask: Sequence[Any] | None = None
    spec_decode: None = None
    prompt_token_id_logprobs: msgspec.Raw | None = None
    error: RequestError | None = None


class CacheStats(msgspec.Struct):
    """Prefix-cache counters since the last report."""

    reset: bool = False
    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0


class Stats(msgspec.Struct):
    """`SchedulerStats`, from which the front end's `/metrics` come."""

    num_running_reqs: int
    num_waiting_reqs: int
    kv_cache_usage: float
    prefix_cache_stats: CacheStats
    running_lora_adapters: dict[str, int]
    waiting_lora_adapters: dict[str, int]
    step_counter: int = 0
    current_wave: int = 0
    kv_cache_eviction_events: tuple[()] = ()


class Utility(msgspec.Struct, array_like=True):
    """A call of one of the engine's methods, answered by call id."""

    client_index: int
    call_id: int
    method: str
    args: list[Any]


def array_of(values: Sequence[int] | Sequence[float], shape: Sequence[int], code: str) -> tuple[str, Sequence[int], msgpack.Ext]:
    """Encode values (row-major) as a NumPy array is encoded on this wire. `code` is NumPy's: `<i8`, `<f4` or `|u1`."""
    return code, shape, msgpack.Ext(_RAW_TENSOR, array.array({"<i8": "q", "<f4": "f", "|u1": "B"}[code], values).tobytes())


def tensor_of(values: Sequence[int] | Sequence[float], shape: Sequence[int], code: str) -> tuple[str, Sequence[int], msgpack.Ext]:
    """Encode values (row-major) as a torch tensor is encoded on this wire. `code` is `int32` or `float32`."""
    return code, shape, msgpack.Ext(_RAW_TENSOR, array.array({"int32": "i", "float32": "f"}[code], values).tobytes())


class Link:
    """The engine's end of the three sockets.

    The handshake is over when the constructor returns: the front end knows this engine and may send requests.
    """

    def __init__(self, handshake: str, rank: int, ready: dict[str, Any]) -> None:
        self._rank = rank
        self._context = zmq.Context()
        self._encoder = msgpack.Encoder()
        self.last_frames: list[bytes] = []
        self._decode_request = msgpack.Decoder(Request).decode
        self._decode_utility = msgpack.Decoder(Utility).decode
        # vLLM's identity of an engine: its index in two bytes, little-endian.
        identity = rank.to_bytes(2, "little")

        greeting = self._context.socket(zmq.DEALER)
        greeting.setsockopt(zmq.IDENTITY, identity)
        greeting.connect(handshake)
        greeting.send(self._hello("HELLO"))
        self.addresses: dict[str, Any] = msgpack.decode(greeting.recv())["addresses"]

        self._inputs = self._context.socket(zmq.DEALER)
        self._inputs.setsockopt(zmq.IDENTITY, identity)
        self._inputs.connect(self.addresses["inputs"][0])
        self._inputs.send(self._encoder.encode(ready))
        self._outputs = self._context.socket(zmq.PUSH)
        self._outputs.connect(self.addresses["outputs"][0])
        greeting.send(self._hello("READY"))

    def receive(self, timeout: float | None) -> Iterable[Request | list[str] | Utility]:
        """Yield every message that has arrived, after waiting up to `timeout` seconds (`None`: for ever) for a first one.

        A list of strings is an abort.
        """
        if not self._inputs.poll(None if timeout is None else math.ceil(timeout * 1000)):
            return
        while True:
            try:
                kind, *self.last_frames = self._inputs.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            match kind[0]:
                case Kind.ADD:
                    request = self._decode_request(self.last_frames[0])
                    if (encoded := request.sampling.prompt_logprob_token_ids) is not None:
                        request.sampling.prompt_logprob_token_ids = self._rows(*encoded)
                    yield request
                case Kind.ABORT:
                    yield msgpack.decode(self.last_frames[0], type=list[str])
                case Kind.UTILITY:
                    yield self._decode_utility(self.last_frames[0])
                case other:
                    raise ValueError(f"message kind {other}: known are {[kind.value for kind in Kind]}")

    def send(self, outputs: Sequence[Output], stats: Stats | None, weight_version: str) -> None:
        """Send what one step gave, with the label of the weights that gave it."""
        finished = [output.request_id for output in outputs if output.finish is not None] or None
        self._send([self._rank, outputs, stats, time.monotonic(), None, finished, None, None, weight_version])

    def answer(self, call_id: int, *, result: Any = None, failure: str | None = None) -> None:
        """Answer a utility call."""
        reply = [call_id, failure, None if failure else [None, result]]
        self._send([self._rank, [], None, time.monotonic(), reply])

    def send_death(self) -> None:
        """Tell the front end that this engine is dead, as an engine does that could still catch its own end."""
        self._outputs.send(_DEATH_SENTINEL)

    def close(self) -> None:
        """Flush what was sent, for up to a second, and close."""
        self._context.destroy(linger=1000)

    def _rows(self, _dtype: str, shape: tuple[int, int], data: msgpack.Ext | int) -> list[list[int]]:
        # Small arrays travel in line; large ones are frames of their own, and the message names the frame by its number.
        buffer = self.last_frames[data] if isinstance(data, int) else bytes(data.data)
        values = array.array("i", buffer).tolist()
        return [values[start : start + shape[1]] for start in range(0, len(values), shape[1])]

    def _send(self, message: list[Any]) -> None:
        self._outputs.send(self._encoder.encode(message))

    def _hello(self, status: str) -> bytes:
        return self._encoder.encode({"status": status, "local": True, "headless": True, "parallel_config_hash": None})
