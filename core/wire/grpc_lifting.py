"""vLLM's gRPC answer as an `Output`.

Follows what vLLM's HTTP servers make of the same engine output, so that a client sees no difference between the wires: the sampled
token leads its candidates, a logprob that is not finite is −9999.0, a rank that is unknown is null.
"""

from collections.abc import Iterable, Sequence
from itertools import repeat
from math import isfinite
from typing import Any, Final, NamedTuple, Self

from google.protobuf.json_format import MessageToDict
from google.protobuf.struct_pb2 import Struct

from core.call import Call, SamplingParams
from core.errors import CallError
from core.reply import ChunkChoice, FinishReason, Logprobs, Output, PromptLogprob, PromptLogprobs, TokenLogprob, TopLogprob
from core.wire.generated.inference_pb2 import FinishInfo, GenerateResponse, PromptInfo, SequenceOutput
from core.wire.grpc_candidates import NOT_FINITE, best_candidates, candidates_of, finite

_FINISH: Final[dict[int, FinishReason]] = {
    FinishInfo.LENGTH: "length",
    FinishInfo.STOP: "stop",
    FinishInfo.ABORTED: "abort",
}


class Reply(NamedTuple):
    """A reply and the bytes that it was read from."""

    message: GenerateResponse
    data: bytes

    @classmethod
    def FromString(cls, data: bytes) -> Self:  # noqa: N802 - protobuf's name
        """Read a reply. Raises: `google.protobuf.message.DecodeError`."""
        return cls(GenerateResponse.FromString(data), data)


def lift_from_grpc(
    call: Call, message: GenerateResponse, index: int, *, prompt: PromptInfo | None = None, data: bytes | None = None
) -> Output:
    """One message of the worker, as output number `index` of the call.

    `prompt` is what an earlier message has said of the prompt: in a stream it comes first, by itself. `data` are the bytes of the
    message; a long one is read faster with them.

    Raises: `CallError` (502) when its lists don't match, or a transfer parameter is no JSON.
    """
    output = Output(choice=ChunkChoice(index=index, token_ids=[]))
    if message.HasField("prompt_info"):
        prompt = message.prompt_info
    try:
        if prompt is not None:
            _lift_prompt(call, prompt, output, index)
        _lift_tokens(call, message.outputs, output, data)
    except (ValueError, IndexError) as error:
        raise CallError(502, f"the worker's answer can't be read: {error}") from error
    return output


def _lift_prompt(call: Call, info: PromptInfo, output: Output, index: int) -> None:
    output.prompt_tokens = info.num_prompt_tokens
    if index:  # only the first output was asked about the prompt
        return
    if call.return_token_ids:
        output.prompt_token_ids = list(info.token_ids)
    if call.sampling.prompt_logprobs is not None:
        output.prompt_logprobs = _prompt_logprobs(list(info.token_ids) or call.token_ids, info)


def _lift_tokens(call: Call, outputs: SequenceOutput, output: Output, data: bytes | None) -> None:
    choice = output.choice
    choice.token_ids = token_ids = list(outputs.token_ids)
    if call.sampling.wants_logprobs:
        choice.logprobs = Logprobs(_logprobs(call.sampling, token_ids, outputs, data))
    if outputs.sampling_mask:
        choice.sampling_mask = [list(row.ids) for row in outputs.sampling_mask]
    if outputs.HasField("finish_info"):
        _lift_finish(outputs.finish_info, output)


def _lift_finish(info: FinishInfo, output: Output) -> None:
    choice = output.choice
    choice.finish_reason = _FINISH.get(info.finish_reason, "error")
    # The model's own end token is no stop reason (vLLM: null for the primary EOS).
    match info.WhichOneof("stop_reason"):
        case "stop_token_id":
            choice.stop_reason = info.stop_token_id
        case "stop_string":
            choice.stop_reason = info.stop_string
        case _:
            pass
    output.completion_tokens = info.num_output_tokens
    if info.HasField("num_cached_tokens"):  # vLLM 0.31 doesn't tell
        output.cached_tokens = info.num_cached_tokens
    if info.HasField("kv_transfer_params"):
        output.kv_transfer_params = _as_dict(info.kv_transfer_params)
    if info.HasField("ec_transfer_params"):
        output.ec_transfer_params = _as_dict(info.ec_transfer_params)


def _logprobs(sampling: SamplingParams, token_ids: Sequence[int], outputs: SequenceOutput, data: bytes | None) -> list[TokenLogprob]:
    values = [value if isfinite(value) else NOT_FINITE for value in outputs.logprobs]
    ranks = list(outputs.ranks)
    if sampling.logprobs == 0:
        others: Iterable[Sequence[TopLogprob]] = repeat((), len(token_ids))
    elif sampling.logprobs == 1 and not sampling.logprob_token_ids:
        others = best_candidates(token_ids, ranks, outputs.candidate_tokens, data)
    else:
        others = (candidates_of(token_id, row) for token_id, row in zip(token_ids, outputs.candidate_tokens, strict=True))
    names = {token_id: f"token_id:{token_id}" for token_id in set(token_ids)}
    return [
        TokenLogprob(token_id, value, rank or None, names[token_id], [TopLogprob(token_id, value, rank or None), *rest])
        for token_id, value, rank, rest in zip(token_ids, values, ranks, others, strict=True)
    ]


def _prompt_logprobs(token_ids: Sequence[int], info: PromptInfo) -> PromptLogprobs:
    positions: PromptLogprobs = [None]
    if not info.logprobs:  # a prompt of one token
        return positions
    rows = [row.tokens for row in info.candidate_tokens] if info.candidate_tokens else [()] * len(token_ids)
    for token_id, value, rank, row in list(zip(token_ids, info.logprobs, info.ranks, rows, strict=True))[1:]:
        # The prompt's own token comes first: Prime-RL reads the first entry.
        entry = {str(token_id): PromptLogprob(finite(value), rank or None, f"token_id:{token_id}")}
        for other in row:
            if other.id != token_id:
                entry[str(other.id)] = PromptLogprob(finite(other.logprob), other.rank or None, f"token_id:{other.id}")
        positions.append(entry)
    return positions


def _as_dict(struct: Struct) -> dict[str, Any]:
    return {key: _whole(value) for key, value in MessageToDict(struct).items()}


def _whole(value: Any) -> Any:
    """Protobuf turns every number into a double; whole ones become integers again, as vLLM reads them (a `remote_port` of 5600)."""
    match value:
        case float() if value.is_integer() and abs(value) < 2**53:
            return int(value)
        case dict():
            return {key: _whole(item) for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType]
        case list():
            return [_whole(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
        case _:
            return value
