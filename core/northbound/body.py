"""The body of `/inference/v1/generate` as a `Call`: parsed once, typed, with the keys that the core doesn't know kept aside."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final, Literal
from uuid import uuid4

import msgspec
from msgspec import Meta, Raw, Struct

from core.call import BODY_KEYS, Call, ReasoningParserKwargs, SamplingParams, StreamOptions, TokenId
from core.errors import BadRequest
from core.refusals import refusing
from core.wire.needs import CACHED_PROMPT_LOGPROBS, SAMPLING_NEEDS, STREAMED_PROMPT_LOGPROBS
from core.wire.transfers import needs_with_transfers

#: It may go on in a header.
Name = Annotated[str, Meta(pattern=r"\A[^\x00-\x1f\x7f]*\Z")]
RANK_HEADER: Final = "x-data-parallel-rank"
_MAX_ID: Final = 256
_RANK_DIGITS: Final = 10
_MAX_SEED: Final = 2**63 - 1
_SCHEMAS: Final = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_EMPTY_SALT: Final = (
    r"Parameter 'cache_salt' must be a non-empty string of at most 128 characters and must not contain '@', '/', '\', or NUL."
)
_SCHEMA_OPTIONS: Final = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")


class _SessionParams(Struct, forbid_unknown_fields=True):
    session_id: Name | None = None


class _Body(Struct):
    """The keys of the body that the core knows, see vLLM's generate route."""

    token_ids: Annotated[list[TokenId], Meta(min_length=1)]
    sampling_params: Raw
    request_id: str | None = None
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    output_mode: Literal["tokens"] | None = None
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: ReasoningParserKwargs | None = None
    #: These four are no keys of vLLM's: routers know them.
    session_params: _SessionParams | None = None
    user: Name | None = None
    session_id: Name | None = None
    user_id: Name | None = None


class _KnownBody(_Body, forbid_unknown_fields=True):
    """The usual body. Only one that holds more pays for a second look."""


class _KnownSampling(SamplingParams, omit_defaults=True, forbid_unknown_fields=True):
    """The usual `sampling_params`."""


class _Decoder:
    """Decodes an object, and gives the members that its type doesn't know as they are."""

    def __init__(self, known: type[Struct], any_: type[Struct], keys: Iterable[str]) -> None:
        self._known = msgspec.json.Decoder(known)
        self._type = any_
        self._any = msgspec.json.Decoder(any_)
        self._members = msgspec.json.Decoder(dict[str, Raw])
        self._keys = frozenset(keys)

    def decode(self, data: bytes | Raw, path: str) -> tuple[Any, dict[str, Raw]]:
        try:
            return self._known.decode(data), {}
        except (msgspec.MsgspecError, RecursionError):
            pass
        with refusing(path, self._type):
            value = self._any.decode(data)
            members = self._members.decode(data)
        return value, {key: raw for key, raw in members.items() if key not in self._keys}


_bodies = _Decoder(_KnownBody, _Body, BODY_KEYS)
_samplings = _Decoder(_KnownSampling, SamplingParams, SamplingParams.__struct_fields__)


def parse_call(data: bytes, headers: Mapping[str, str]) -> Call:
    """The call that a body and its headers (names in lower case) ask for.

    A null means the same as an absent key, as in vLLM. `x-request-id` wins over the body's `request_id`, and `x-session-id` over its
    session.

    Raises: `BadRequest`, whose `param` is the field's path.
    """
    body, unclaimed = _bodies.decode(data, "")
    sampling, unclaimed_sampling = _samplings.decode(body.sampling_params, "sampling_params")
    _check(sampling)
    stream = bool(body.stream)
    owner = _owner(body)
    if body.cache_salt == "":  # not the same as none: vLLM 0.33 refuses it, in these words
        raise BadRequest(_EMPTY_SALT, param="cache_salt")
    if body.stream_options and not stream:
        raise BadRequest("stream_options: only a streamed call has them; send stream: true", param="stream_options")
    call = Call(
        id=call_id(headers, body.request_id),
        token_ids=body.token_ids,
        sampling=sampling,
        model=body.model or "",
        stream=stream,
        stream_options=body.stream_options or StreamOptions(),
        cache_salt=body.cache_salt or "",
        priority=body.priority or 0,
        session_id=headers.get("x-session-id") or owner.get("session_params.session_id") or owner.get("session_id", ""),
        owner=owner,
        data_parallel_rank=rank_of(headers),
        kv_transfer_params=body.kv_transfer_params,
        ec_transfer_params=body.ec_transfer_params,
        return_token_ids=bool(body.return_token_ids),
        reasoning_ended=body.reasoning_ended,
        reasoning_parser_kwargs=body.reasoning_parser_kwargs,
        headers=headers,
        unclaimed=unclaimed,
        unclaimed_sampling={key: _decode(raw, f"sampling_params.{key}") for key, raw in unclaimed_sampling.items()},
        needs=_needs(sampling, stream=stream),
    )
    if call.kv_transfer_params or call.ec_transfer_params or call.reasoning_parser_kwargs:
        call.needs = needs_with_transfers(call)
    return call


def _owner(body: _Body) -> dict[str, str]:
    said = body.session_params.session_id if body.session_params else None
    if not (said or body.user or body.session_id or body.user_id):
        return {}
    keys = {"session_params.session_id": said, "user": body.user, "session_id": body.session_id, "user_id": body.user_id}
    return {key: value for key, value in keys.items() if value}


def _check(sampling: SamplingParams) -> None:
    """What only fields together can get wrong."""
    ids, count = sampling.logprob_token_ids, sampling.logprobs
    if ids is not None and count not in (None, len(ids)):
        raise BadRequest(
            "when both logprobs and logprob_token_ids are set, logprobs must equal len(logprob_token_ids). "
            f"Got logprobs={count}, len(logprob_token_ids)={len(ids)}.",
            param="sampling_params.logprobs",
        )
    # Three values that vLLM's HTTP servers refuse, and that gRPC would take for "not said".
    if sampling.repetition_penalty == 0:
        raise BadRequest("repetition_penalty must be in (0, inf), got 0", param="sampling_params.repetition_penalty")
    if sampling.allowed_token_ids == []:
        raise BadRequest("allowed_token_ids should not be empty", param="sampling_params.allowed_token_ids")
    if wanted := sampling.structured_outputs:
        path = "sampling_params.structured_outputs"
        given = [key for key in _SCHEMAS if getattr(wanted, key) is not None]
        if not given:
            raise BadRequest(f"{path}: one of {', '.join(_SCHEMAS)} has to be there", param=path)
        if len(given) > 1:
            raise BadRequest(f"{path}: {' and '.join(given)} exclude each other; send one", param=path)
    if sampling.seed is not None and sampling.seed + (sampling.n or 1) > _MAX_SEED + 1:
        path = "sampling_params.seed"
        raise BadRequest(f"{path}: output i of n has seed + i, and that must stay below 2**63", param=path)


def call_id(headers: Mapping[str, str], in_body: str | None) -> str:
    """The id that the client gave its call, or a new one. Raises: `BadRequest`."""
    name, id_ = ("x-request-id", given) if (given := headers.get("x-request-id")) else ("request_id", in_body)
    if not id_:
        return uuid4().hex
    if len(id_) > _MAX_ID or not (id_.isascii() and id_.isprintable()):
        raise BadRequest(f"{name}: at most {_MAX_ID} printable ASCII characters; it comes back in a header", param=name)
    return id_


def rank_of(headers: Mapping[str, str]) -> int | None:
    """The data-parallel rank that the client asks for. Raises: `BadRequest`."""
    text = headers.get(RANK_HEADER)
    if text is None:
        return None
    digits = text.strip()
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= _RANK_DIGITS and int(digits) < 2**32):
        raise BadRequest(f"{RANK_HEADER}: not a rank; send a whole number from 0", param=RANK_HEADER)
    return int(digits)


def _needs(sampling: SamplingParams, *, stream: bool) -> set[str]:
    needs = {need for key, need in SAMPLING_NEEDS if getattr(sampling, key) is not None}
    if stream and sampling.prompt_logprobs is not None:
        needs.add(STREAMED_PROMPT_LOGPROBS)
    if sampling.skip_reading_prefix_cache is False and sampling.prompt_logprobs is not None:
        needs.add(CACHED_PROMPT_LOGPROBS)
    if wanted := sampling.structured_outputs:
        needs |= {f"sampling_params.structured_outputs.{key}" for key in _SCHEMA_OPTIONS if getattr(wanted, key) is not None}
    return needs


def _decode(raw: Raw, path: str) -> Any:
    with refusing(path):
        return msgspec.json.decode(raw)
