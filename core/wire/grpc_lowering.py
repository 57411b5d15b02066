"""A call as vLLM's gRPC request.

Omitted values mean what they mean on vLLM's generate route over HTTP, not what gRPC would make of them: temperature 1.0 (gRPC: 0.0)
and the rest of the context (gRPC: the model's own limit first).
"""

from typing import Any, Final

import msgspec
from google.protobuf.json_format import ParseDict, ParseError
from google.protobuf.struct_pb2 import Struct

from core.call import Call, SamplingParams, StructuredOutputs, id_of_output
from core.errors import BadRequest
from core.wire.generated.inference_pb2 import (
    CandidateTokens,
    DecodingParameters,
    GenerateRequest,
    KVCacheParameters,
    RandomSampling,
    ResponseOptions,
    StoppingCriteria,
    TokenIds,
)

#: Where a client says 0, since to a worker 0 is nothing said, and -0.0 too: the model's generation config would hold (vllm-rs 0.33). The
#: least that is no subnormal, it changes no logit; the engine has the work of a penalty, though.
_NO_PENALTY: Final = 2.0**-126


def lower_to_grpc(call: Call, *, index: int, max_model_len: int) -> GenerateRequest:
    """The request for output number `index` of a call; `max_model_len` in tokens.

    The seed of output i is the caller's plus i, as vLLM derives it for `n > 1`.

    Raises: `BadRequest` for transfer parameters that a protobuf `Struct` can't hold.
    """
    sampling = call.sampling
    reasoning = call.reasoning_parser_kwargs
    request = GenerateRequest(
        request_id=call.id if sampling.n in (None, 1) else id_of_output(call.id, index),
        model=call.model,
        token_ids={"ids": call.token_ids},  # a message would be copied
        temperature=1.0 if sampling.temperature is None else sampling.temperature,
        sampling=_random(sampling, index),
        decoding=_decoding(sampling),
        stopping=_stopping(sampling, max_model_len),
        response=_response(call, prompt=index == 0),
        kv=_kv(call),
        priority=call.priority,
        session_id=call.session_id or None,
        lora_name=call.adapter,
        watermarking=sampling.watermarking,
    )
    if call.reasoning_ended is not None:
        request.engine_reasoning_gate.reasoning_ended = call.reasoning_ended
    if reasoning and reasoning.chat_template_kwargs is not None:
        request.engine_reasoning_gate.chat_template_kwargs.CopyFrom(_struct(reasoning.chat_template_kwargs, "reasoning_parser_kwargs"))
    return request


def _random(sampling: SamplingParams, index: int) -> RandomSampling:
    seed = sampling.seed
    return RandomSampling(
        # -1 and 0 both mean "all tokens" (vLLM), and gRPC has no -1.
        top_k=None if sampling.top_k is None else max(sampling.top_k, 0),
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=seed if seed is None or seed == -1 else seed + index,
    )


def _decoding(sampling: SamplingParams) -> DecodingParameters:
    wanted = sampling.structured_outputs or StructuredOutputs()
    return DecodingParameters(
        presence_penalty=_penalty(sampling.presence_penalty),
        frequency_penalty=_penalty(sampling.frequency_penalty),
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=sampling.logit_bias,
        allowed_token_ids=sampling.allowed_token_ids,
        bad_words_token_ids=[TokenIds(ids=ids) for ids in sampling.bad_words_token_ids or ()],
        json=_text(wanted.json),
        regex=wanted.regex,
        choice=None if wanted.choice is None else DecodingParameters.StringChoices(choices=wanted.choice),
        grammar=wanted.grammar,
        json_object=wanted.json_object,
        structural_tag=_text(wanted.structural_tag),
    )


def _penalty(said: float | None) -> float | None:
    return _NO_PENALTY if said == 0 else said


def _text(schema: str | dict[str, Any] | None) -> str | None:
    return msgspec.json.encode(schema).decode() if isinstance(schema, dict) else schema


def _stopping(sampling: SamplingParams, max_model_len: int) -> StoppingCriteria:
    stop = sampling.stop
    return StoppingCriteria(
        # The worker cuts it down to what the prompt leaves.
        max_new_tokens=max_model_len if sampling.max_tokens is None else sampling.max_tokens,
        min_new_tokens=sampling.min_tokens,
        stop_token_ids=sampling.stop_token_ids,
        stop_strings=[stop] if isinstance(stop, str) else stop,
        include_stop_strings=sampling.include_stop_str_in_output,
        ignore_eos=sampling.ignore_eos,
        thinking_token_budget=sampling.thinking_token_budget,
    )


def _response(call: Call, *, prompt: bool) -> ResponseOptions:
    """What the worker reports; what it says of the prompt is the same for each of `n` outputs, so only one is asked."""
    sampling = call.sampling
    return ResponseOptions(
        output_text=False,
        output_token_ids=True,
        prompt_token_ids=prompt and call.return_token_ids,
        output_logprobs=sampling.wants_logprobs,
        output_candidates=_output_candidates(sampling),
        prompt_logprobs=prompt and sampling.prompt_logprobs is not None,
        prompt_candidates=_candidates(sampling.prompt_logprobs) if prompt else None,
    )


def _output_candidates(sampling: SamplingParams) -> CandidateTokens | None:
    ids = sampling.logprob_token_ids
    return _candidates(sampling.logprobs) if ids is None else CandidateTokens(token_ids=TokenIds(ids=ids))


def _candidates(count: int | None) -> CandidateTokens | None:
    if not count:
        return None
    return CandidateTokens(all=True) if count == -1 else CandidateTokens(top_n=count)


def _kv(call: Call) -> KVCacheParameters:
    return KVCacheParameters(
        bypass_prefix_cache=call.sampling.skip_reading_prefix_cache,
        cache_salt=call.identity.namespace,
        kv_transfer_params=None if call.kv_transfer_params is None else _struct(call.kv_transfer_params, "kv_transfer_params"),
        ec_transfer_params=None if call.ec_transfer_params is None else _struct(call.ec_transfer_params, "ec_transfer_params"),
    )


def _struct(values: dict[str, Any], param: str) -> Struct:
    try:
        return ParseDict(values, Struct())
    except (ParseError, OverflowError) as error:  # nested too deeply, or a number beyond what a double holds
        raise BadRequest(f"{param}: gRPC can't carry it: {error}", param=param) from error
