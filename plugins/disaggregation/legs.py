"""The parts of a call: what each worker is asked."""

from typing import Any, Final
from uuid import uuid4

from msgspec.structs import replace

from core import STREAMED_PROMPT_LOGPROBS, Call, GenerateReply, SamplingParams, needs_with_transfers

#: What vLLM's connectors understand as "compute this prompt for somebody else".
HAND_OVER: Final[dict[str, Any]] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
#: What shapes more than one token, and would keep a part of one token from its end, or its wire from a worker. What is wrong with these is
#: told by `checks`; what is wrong with the rest, by the worker that is asked first.
_OF_THE_OUTPUT: Final = (
    "n",
    "min_tokens",
    "stop",
    "include_stop_str_in_output",
    "repetition_detection",
    "stream_interval",
    "trace_decode_token_ids",
)
#: What a worker that doesn't run the prompt can't say, and the prefill has said.
_OF_THE_PROMPT: Final = ("prompt_logprobs", "prompt_logprob_token_ids", "prompt_logprob_start")


def encode_call(call: Call) -> Call:
    """The part that looks at the media: one token, for what is told with it."""
    return _one_token(_without(call, _OF_THE_OUTPUT + _OF_THE_PROMPT, role="encode"))


def prefill_call(call: Call, **notes: Any) -> Call:
    """The part that computes the prompt, and says what is asked of it. It checks the rest, too: what it refuses never gets further.

    `notes` are put to those of the call.
    """
    leg = _without(call, _OF_THE_OUTPUT, role="prefill", kv_transfer_params=dict(HAND_OVER), notes=call.notes | notes)
    return _one_token(leg)


def decode_call(call: Call, *, hold: float) -> Call:
    """The part that makes the output, as far as it is known before there is a hand-off."""
    later = _without(call, _OF_THE_PROMPT, stream=True, retries=1, return_token_ids=False, ec_transfer_params=None, hold=hold)
    later.needs = needs_with_transfers(later)
    return later


def take_over(decode: Call, prefilled: GenerateReply, *legs: str) -> Call:
    """That part with what the prefill returned, which goes there as it is."""
    start = decode.sampling.routed_experts_prompt_start
    sampling = replace(decode.sampling, routed_experts_prompt_start=None if start is None else prefilled.usage.prompt_tokens)
    later = replace(decode, sampling=sampling, kv_transfer_params=prefilled.kv_transfer_params, legs=legs)
    later.needs = needs_with_transfers(later)
    return later


def release_call(call: Call, prefilled: GenerateReply) -> Call:
    """What frees the blocks of a hand-off that nobody takes over: the least of decode calls.

    Nothing in it can be refused but the prompt, which the prefill has taken. Whatever was computed with other weights by now stays apart
    from other calls' caches: its salt is its own.
    """
    least = replace(
        call,
        id=f"{call.id}-release",
        role="decode",
        sampling=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
        needs={need for need in call.needs if "sampling_params." not in need},
        kv_transfer_params=prefilled.kv_transfer_params,
        ec_transfer_params=None,
        identity=replace(call.identity, namespace=uuid4().hex, per_worker=None, adapter=""),
        adapter="",
        session_id="",
        owner={},
        data_parallel_rank=None,
        stream=False,
        retries=0,
        return_token_ids=False,
        reasoning_ended=None,
        reasoning_parser_kwargs=None,
        notes=dict(call.notes),
    )
    least.needs = needs_with_transfers(least)
    return least


def _one_token(leg: Call) -> Call:
    """Make it a leg of one token, which goes to any rank."""
    leg.sampling.max_tokens = 1
    leg.sampling.ignore_eos = True
    leg.stream = False
    leg.needs.discard(STREAMED_PROMPT_LOGPROBS)
    leg.retries = 1
    leg.data_parallel_rank = None
    leg.legs = ()
    return leg


def _without(call: Call, dropped: tuple[str, ...], **fields: Any) -> Call:
    """A copy of the call, and of its `sampling`, in which these members of it aren't set, nor needed from a wire."""
    sampling: SamplingParams = replace(call.sampling, **dict.fromkeys(dropped))
    names = tuple(f"sampling_params.{name}" for name in dropped)
    return replace(call, sampling=sampling, needs={need for need in call.needs if not need.endswith(names)}, **fields)
