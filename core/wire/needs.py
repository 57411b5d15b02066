"""What a call needs beyond the plain fields, and what a worker's wire can do.

A *need* is the path of a field that not every wire carries (`sampling_params.stop`). A wire's *can* is the set of needs it serves.
The facts are vLLM 0.33's: what its gRPC contract has no field for, and what its HTTP servers refuse or ignore on the generate route.
"""

from collections.abc import Collection, Mapping, Sequence, Set
from typing import Final, Literal

Wire = Literal["grpc", "http"]

_GRPC = "grpc"
_RUST = "the Rust HTTP server"
_PYTHON = "the Python HTTP server"

STREAMED_PROMPT_LOGPROBS: Final = "stream with sampling_params.prompt_logprobs"
#: A prefill whose hand-off comes in a stream.
STREAMED_HAND_OVER: Final = "stream with kv_transfer_params.do_remote_decode"
#: Prompt logprobs of a prompt that may be read from the cache.
CACHED_PROMPT_LOGPROBS: Final = "sampling_params.skip_reading_prefix_cache: false with sampling_params.prompt_logprobs"
#: Integers that are no doubles, by the field that they are in.
LARGE_INTEGERS: Final = {
    field: f"integers from 2**53 on in {field}" for field in ("kv_transfer_params", "ec_transfer_params", "reasoning_parser_kwargs")
}
#: A call that must go over one wire, whatever it asks for: a plugin adds one of these for what only it knows of, by `Call.need`.
OVER_GRPC: Final = "gRPC"
OVER_HTTP: Final = "HTTP"
_WIRES: Final = frozenset({OVER_GRPC, OVER_HTTP})
#: need → the servers that can serve it.
_SERVED_BY: Final = {
    OVER_GRPC: {_GRPC},
    OVER_HTTP: {_RUST, _PYTHON},
    # The Rust HTTP server can't read its keys.
    "sampling_params.logit_bias": {_GRPC, _PYTHON},
    # The Rust HTTP server refuses stop strings on this route; gRPC matches them in the front end.
    "sampling_params.stop": {_GRPC, _PYTHON},
    "sampling_params.include_stop_str_in_output": {_GRPC, _PYTHON},
    # No HTTP server streams prompt logprobs; over gRPC they are in the stream's first message.
    STREAMED_PROMPT_LOGPROBS: {_GRPC},
    # Nor a hand-off, which over gRPC is in the last message.
    STREAMED_HAND_OVER: {_GRPC},
    # gRPC has no field for these.
    "sampling_params.vllm_xargs": {_RUST, _PYTHON},
    "sampling_params.extra_args": {_RUST, _PYTHON},
    "sampling_params.prompt_logprob_token_ids": {_RUST, _PYTHON},
    "sampling_params.prompt_logprob_start": {_RUST, _PYTHON},
    "sampling_params.repetition_detection": {_RUST, _PYTHON},
    "sampling_params.routed_experts_prompt_start": {_RUST, _PYTHON},
    "sampling_params.stream_interval": {_RUST, _PYTHON},
    "sampling_params.structured_outputs.disable_any_whitespace": {_RUST, _PYTHON},
    "sampling_params.structured_outputs.disable_additional_properties": {_RUST, _PYTHON},
    "sampling_params.structured_outputs.whitespace_pattern": {_RUST, _PYTHON},
    "sampling_params.trace_decode_token_ids": {_PYTHON},
    # gRPC takes bad words as token ids only.
    "sampling_params.bad_words": {_RUST, _PYTHON},
    # To gRPC a false is nothing said, and for prompt logprobs the engine then reads no cache.
    CACHED_PROMPT_LOGPROBS: {_RUST, _PYTHON},
    # gRPC's numbers are doubles.
    **{need: {_RUST, _PYTHON} for need in LARGE_INTEGERS.values()},
}
#: Keys of `sampling_params` whose presence is a need, with the need.
SAMPLING_NEEDS: Final = tuple(
    (need.removeprefix("sampling_params."), need) for need in _SERVED_BY if need.startswith("sampling_params.") and need.count(".") == 1
)
GRPC_CAN: Final = frozenset(need for need, servers in _SERVED_BY.items() if _GRPC in servers)
RUST_HTTP_CAN: Final = frozenset(need for need, servers in _SERVED_BY.items() if _RUST in servers)
PYTHON_HTTP_CAN: Final = frozenset(need for need, servers in _SERVED_BY.items() if _PYTHON in servers)
#: Some HTTP server.
HTTP_CAN: Final = RUST_HTTP_CAN | PYTHON_HTTP_CAN


#: The fields of needs that are no field's path.
_FIELDS: Final = {
    STREAMED_PROMPT_LOGPROBS: "sampling_params.prompt_logprobs",
    STREAMED_HAND_OVER: "kv_transfer_params.do_remote_decode",
    CACHED_PROMPT_LOGPROBS: "sampling_params.skip_reading_prefix_cache",
    **{need: field for field, need in LARGE_INTEGERS.items()},
}
#: How the paths of settings begin, which are nobody's `param`.
_SETTINGS: Final = "plugins."


def missing(needs: Set[str], wires: Sequence[Set[str]]) -> Set[str]:
    """Why none of these wires serves these needs: those that none of them can; or, where it is only that no wire can all, those that some
    can't.
    """
    return needs - frozenset[str]().union(*wires) or needs - frozenset(needs).intersection(*wires)


def fields(need: str, needed_by: Mapping[str, Sequence[str]]) -> Sequence[str]:
    """What the client knows a need by; see `Call.needed_by`."""
    return needed_by.get(need) or (need,)


def refusal(missing: Collection[str], needed_by: Mapping[str, Sequence[str]]) -> tuple[str, str | None]:
    """What a client is told whose call no wire carries, and the path of its field. `missing` is not empty, see there."""
    named = [(name, need) for need in sorted(missing) for name in fields(need, needed_by)]
    parts = [f"{name} (needs {' or '.join(sorted(_SERVED_BY.get(need, {'another worker'})))})" for name, need in sorted(named)]
    own = sorted(_FIELDS.get(name, name) for name, _ in named if not name.startswith(_SETTINGS) and name not in _WIRES)
    return f"no worker can serve {' and '.join(parts)}{' in one call' if len(parts) > 1 else ''}", own[0] if own else None
