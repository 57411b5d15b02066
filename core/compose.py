"""The reply of a unary call, out of what the worker said of each output."""

from collections.abc import Sequence

from core.call import Call
from core.reply import Choice, GenerateReply, Output, PromptTokensDetails, Usage


def compose(call: Call, model: str, outputs: Sequence[Output]) -> GenerateReply:
    """The whole reply of a model; what concerns the prompt is told by the first output."""
    first = outputs[0]
    return GenerateReply(
        request_id=call.id,
        model=call.reply_model or model,
        created=int(call.created),
        choices=[_choice(output) for output in outputs],
        usage=usage_of(outputs),
        prompt_logprobs=first.prompt_logprobs,
        prompt_token_id_logprobs=first.prompt_token_id_logprobs,
        prompt_token_ids=first.prompt_token_ids,
        mm_placeholders=first.mm_placeholders,
        kv_transfer_params=first.kv_transfer_params,
        ec_transfer_params=first.ec_transfer_params,
        metrics=first.metrics,
    )


def usage_of(outputs: Sequence[Output]) -> Usage:
    """Token counts over all outputs; each has the same prompt, which counts once."""
    prompt = outputs[0].prompt_tokens or 0
    completion = sum(output.completion_tokens or 0 for output in outputs)
    cached = outputs[0].cached_tokens
    return Usage(prompt, completion, prompt + completion, None if cached is None else PromptTokensDetails(cached))


def _choice(output: Output) -> Choice:
    part = output.choice
    return Choice(
        index=part.index,
        token_ids=part.token_ids,
        logprobs=part.logprobs,
        finish_reason=part.finish_reason,
        stop_reason=part.stop_reason,
        routed_experts=part.routed_experts,
        sampling_mask=part.sampling_mask,
        weight_versions=part.weight_versions,
    )
