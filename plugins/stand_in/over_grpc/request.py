"""From a `GenerateRequest` to a call, with vLLM 0.33's defaults for what is absent."""

from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from google.protobuf.json_format import MessageToDict
from google.protobuf.struct_pb2 import Struct

from core.wire.generated import inference_pb2 as pb
from plugins.stand_in.engine.adapters import Adapters
from plugins.stand_in.engine.call import Call, Medium, Sampling
from plugins.stand_in.engine.checks import check_json_schema
from plugins.stand_in.engine.refusal import Problem, Refused, invalid
from plugins.stand_in.engine.text import encode
from plugins.stand_in.options import Options

#: Above this a double is no longer exact, and vLLM leaves it a float.
_EXACT = 2**53 - 1


def to_call(request: pb.GenerateRequest, options: Options, adapters: Adapters, rank: int | None = None) -> Call:
    """Read a request; `rank` is the metadata's. Checks, in vLLM's order: model, prompt, what can't be said, adapter, media.

    Refused: NOT_FOUND (model, adapter), INVALID, PRECONDITION (LoRA is off).
    """
    if request.model and request.model not in options.names:
        raise Refused(Problem.NOT_FOUND, f"model `{request.model}` not found")
    if request.WhichOneof("prompt") is None:
        raise invalid("prompt is required")
    if request.sampling.num_sequences > 1:
        raise invalid("num_sequences > 1 is not supported")
    sampling = _sampling(request)
    adapter = adapters.get(request.lora_name) if request.lora_name else None
    media = _media(request, options)
    response = request.response
    return Call(
        request_id=request.request_id or str(uuid4()),
        prompt=encode(request.text) if request.WhichOneof("prompt") == "text" else request.token_ids.ids,
        sampling=sampling,
        adapter=adapter,
        media=media,
        data_parallel_rank=rank,
        salt=request.kv.cache_salt or None,
        bypass_prefix_cache=request.kv.bypass_prefix_cache,
        truncate_to=request.truncate_prompt_tokens,
        text=response.output_text if response.HasField("output_text") else True,
        skip_special_tokens=response.skip_special_tokens if response.HasField("skip_special_tokens") else True,
        stream_interval=options.stream_interval,
        kv_transfer_params=_from_struct(request.kv.kv_transfer_params),
    )


def _sampling(request: pb.GenerateRequest) -> Sampling:
    random, decoding, stopping, response = request.sampling, request.decoding, request.stopping, request.response
    chosen = response.output_candidates.WhichOneof("select") == "token_ids"
    structured_output = _structured_output(decoding)
    prompt_logprobs = _count(response.prompt_candidates) if response.prompt_logprobs else None
    if prompt_logprobs is not None and response.prompt_candidates.WhichOneof("select") == "token_ids":
        raise invalid("prompt_candidates: selecting token_ids is not supported")
    ids = tuple(response.output_candidates.token_ids.ids) if response.output_logprobs and chosen else None
    return Sampling(
        temperature=request.temperature,
        top_k=random.top_k,
        top_p=random.top_p if random.HasField("top_p") else 1.0,
        min_p=random.min_p,
        seed=random.seed if random.HasField("seed") and random.seed != -1 else None,
        presence_penalty=decoding.presence_penalty,
        frequency_penalty=decoding.frequency_penalty,
        repetition_penalty=decoding.repetition_penalty or 1.0,
        logit_bias=dict(decoding.logit_bias),
        allowed_token_ids=tuple(decoding.allowed_token_ids) or None,
        bad_words=tuple(tuple(word.ids) for word in decoding.bad_words_token_ids),
        structured_output=structured_output,
        thinking_token_budget=stopping.thinking_token_budget if stopping.HasField("thinking_token_budget") else None,
        max_tokens=stopping.max_new_tokens or None,
        min_tokens=stopping.min_new_tokens,
        stop_token_ids=tuple(stopping.stop_token_ids),
        ignore_eos=stopping.ignore_eos,
        stop_strings=tuple(stopping.stop_strings),
        include_stop_strings=stopping.include_stop_strings,
        logprobs=None if not response.output_logprobs else len(ids) if ids is not None else _count(response.output_candidates),
        logprob_token_ids=ids,
        prompt_logprobs=prompt_logprobs,
    )


def _count(candidates: pb.CandidateTokens) -> int:
    return -1 if candidates.all else candidates.top_n


def _structured_output(decoding: pb.DecodingParameters) -> tuple[str, Any] | None:
    kind = decoding.WhichOneof("structured_output")
    if kind is None or (kind == "json_object" and not decoding.json_object):
        return None
    if kind == "json":
        check_json_schema(decoding.json)
    return kind, tuple(decoding.choice.choices) if kind == "choice" else getattr(decoding, kind)


def _media(request: pb.GenerateRequest, options: Options) -> Sequence[Medium]:
    for place, item in enumerate(request.media):
        source = item.WhichOneof("source")
        if source is None:
            raise invalid(f"media[{place}].source is required")
        if source == "features" and not item.features.HasField("kwargs"):
            raise invalid(f"media[{place}]: features.kwargs is required")
    if request.media and not options.enable_media:
        raise invalid("media: the model takes text only")
    media = [_medium(f"media[{place}]", item, request) for place, item in enumerate(request.media)]
    return tuple(sorted(media, key=lambda medium: medium.offset))


def _medium(where: str, item: pb.MediaItem, request: pb.GenerateRequest) -> Medium:
    """One of the media, as far as it's looked at: what its `kwargs` hold is taken as it is."""
    features = item.features
    if item.WhichOneof("source") != "features" or request.WhichOneof("prompt") != "token_ids":
        raise invalid(f"{where}: the stand-in takes prepared features, and token_ids that have room for them")
    if not features.identifier:
        raise invalid(f"{where}: features.identifier must not be empty")
    if not features.length or features.offset + features.length > len(request.token_ids.ids):
        raise invalid(f"{where}: features.offset and features.length must lie within the prompt")
    return Medium(features.identifier, features.offset, features.length)


def _from_struct(struct: Struct) -> dict[str, Any] | None:
    return {key: _exact(value) for key, value in MessageToDict(struct).items()} if struct.fields else None


def _exact(value: Any) -> Any:
    """Integral doubles become integers, as far as they are exact."""
    if isinstance(value, float) and value.is_integer() and abs(value) <= _EXACT:
        return int(value)
    if isinstance(value, list):
        return [_exact(item) for item in value]
    if isinstance(value, dict):
        return {key: _exact(item) for key, item in value.items()}
    return value
