"""A call as the JSON body of vLLM's generate route."""

from typing import Any, Final

import msgspec

from core.call import Call, id_of_output

_PROMPT_KEYS: Final = ("prompt_logprobs", "prompt_logprob_token_ids", "prompt_logprob_start")


def lower_to_http(call: Call, *, index: int, max_model_len: int) -> dict[str, Any]:
    """The JSON body for output number `index` of a call, with the same meaning of what is omitted as over gRPC."""
    sampling: dict[str, Any] = msgspec.to_builtins(call.sampling)
    single = sampling.pop("n", 1) == 1
    if index:  # what the worker says of the prompt is the same for each output, so only the first one asks
        for key in _PROMPT_KEYS:
            sampling.pop(key, None)
    sampling.setdefault("temperature", 1.0)
    sampling.setdefault("max_tokens", max(max_model_len - len(call.token_ids), 1))
    if "logprob_token_ids" in sampling:  # without a count the Rust server drops them from its answer
        sampling["logprobs"] = len(sampling["logprob_token_ids"])
    if sampling.get("top_k") == -1:  # the Rust server takes no −1; 0 means the same
        sampling["top_k"] = 0
    if sampling.get("seed", -1) != -1:
        sampling["seed"] += index
    body: dict[str, Any] = {
        "request_id": call.id if single else id_of_output(call.id, index),
        "model": call.adapter or call.model or None,
        "token_ids": call.token_ids,
        "sampling_params": sampling,
        "cache_salt": call.identity.namespace or None,
        "priority": call.priority,
        "kv_transfer_params": call.kv_transfer_params,
        "ec_transfer_params": call.ec_transfer_params,
        "return_token_ids": (call.return_token_ids and index == 0) or None,
        "reasoning_ended": call.reasoning_ended,
        "reasoning_parser_kwargs": msgspec.to_builtins(call.reasoning_parser_kwargs),
    }
    if call.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return {key: value for key, value in body.items() if value is not None}
