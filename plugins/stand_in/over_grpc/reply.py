"""From the engine's events to `GenerateResponse`, in a stream or as one."""

from collections.abc import Iterable

from core.wire.generated import inference_pb2 as pb
from plugins.stand_in.engine.call import Candidate, Finish, PromptRead, Row, Step

_REASONS = {
    "length": pb.FinishInfo.LENGTH,
    "stop": pb.FinishInfo.STOP,
    "abort": pb.FinishInfo.ABORTED,
}


def add_prompt(response: pb.GenerateResponse, prompt: PromptRead, options: pb.ResponseOptions) -> None:
    """Put what is known of the prompt into a response."""
    info = response.prompt_info
    info.num_prompt_tokens = len(prompt.tokens)
    if options.prompt_token_ids:
        info.token_ids.extend(prompt.tokens)
    if prompt.rows is not None:
        # Position 0 has no context; vLLM has no null here, and gives zeros and no candidates.
        for row in (Row(prompt.tokens[0], 0.0, 0), *prompt.rows):
            info.logprobs.append(row.logprob)
            info.ranks.append(row.rank)
            _add_candidates(info.candidate_tokens.add(), row.candidates)


def add_step(response: pb.GenerateResponse, step: Step, options: pb.ResponseOptions, *, text: bool) -> None:
    """Put new tokens, and the finish if it has come, into a response; call it again to append more."""
    outputs = response.outputs
    outputs.num_tokens += len(step.rows)
    if text:
        outputs.text += step.text
    if options.output_token_ids:
        outputs.token_ids.extend(row.token for row in step.rows)
    if options.output_logprobs:
        for row in step.rows:
            outputs.logprobs.append(row.logprob)
            outputs.ranks.append(row.rank)
            _add_candidates(outputs.candidate_tokens.add(), row.candidates)
    if step.finish is not None:
        _add_finish(outputs.finish_info, step.finish)


def _add_candidates(info: pb.CandidateTokenInfo, candidates: Iterable[Candidate]) -> None:
    for token, logprob, rank in candidates:
        info.tokens.add(id=token, logprob=logprob, rank=rank)


def _add_finish(info: pb.FinishInfo, finish: Finish) -> None:
    info.num_output_tokens = finish.output_tokens
    info.finish_reason = _REASONS[finish.reason]
    info.num_cached_tokens = finish.cached_tokens
    if finish.stop_token_id is not None:
        info.stop_token_id = finish.stop_token_id
    elif finish.eos_token_id is not None:
        info.eos_token_id = finish.eos_token_id
    elif finish.stop_string is not None:
        info.stop_string = finish.stop_string
    if finish.kv_transfer_params is not None:
        info.kv_transfer_params.update(finish.kv_transfer_params)
    if finish.ec_transfer_params is not None:
        info.ec_transfer_params.update(finish.ec_transfer_params)
