"""Logprobs that a trainer can use.

Prime-RL's clients give a rollout up when a sampled token's logprob is −9999.0 or no number, and take such a value of a prompt's token
for a real one. Better that the call fails here, with a status that they retry, and with the place of the fault.
"""

from math import isfinite
from typing import Final

from core import Call, CallError, GenerateReply

#: What vLLM writes for a logprob that JSON can't hold.
_NOT_FINITE: Final = -9999.0


def check_finite(call: Call, reply: GenerateReply) -> None:
    """Look at what the call asked for: the sampled tokens of every choice, and the prompt's own tokens.

    Raises: `CallError` (500) for the first that isn't finite, with its place and its token.
    """
    if call.sampling.wants_logprobs:
        for choice in reply.choices:
            content = choice.logprobs.content if choice.logprobs else []
            values = [entry.logprob for entry in content]
            if _NOT_FINITE in values or not isfinite(sum(values)):  # a pass each, at the speed of C: replies have thousands of tokens
                at = next(i for i, value in enumerate(values) if not _is_finite(value))
                raise _fault(f"choices[{choice.index}].logprobs.content[{at}]", content[at].token_id, values[at])
    if call.sampling.prompt_logprobs is not None:
        for at, position in enumerate(reply.prompt_logprobs or ()):
            if position:
                token_id, own = next(iter(position.items()))
                if not _is_finite(own.logprob):
                    raise _fault(f"prompt_logprobs[{at}]", token_id, own.logprob)


def _is_finite(logprob: float) -> bool:
    return isfinite(logprob) and logprob != _NOT_FINITE


def _fault(path: str, token_id: int | str, logprob: float) -> CallError:
    return CallError(500, f"{path}: the worker gave token {token_id} the logprob {logprob}, and a trainer needs a finite one", param=path)
