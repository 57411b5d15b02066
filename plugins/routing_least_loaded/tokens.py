"""How many tokens a call will hold on its worker."""

from typing import Final

from core import Call

#: The mean follows the last so many calls, roughly.
_MEMORY: Final = 64
#: Bytes of a relayed body that make a token, roughly: its text was not tokenized.
_BYTES_PER_TOKEN: Final = 4


class ExpectedTokens:
    """Prompt and expected output. `output_tokens` is what an output has until one was seen."""

    def __init__(self, output_tokens: int) -> None:
        self._mean = float(output_tokens)
        self._seen = 0

    def of(self, call: Call) -> int:
        """The tokens of a call, over all its outputs; at least one."""
        limit = call.sampling.max_tokens
        output = self._mean if limit is None else min(self._mean, limit)
        return max(_prompt(call) + int(output * (call.sampling.n or 1)), 1)

    def learn(self, call: Call, output_tokens: int) -> None:
        """An attempt of the call had so many output tokens; none tells nothing."""
        if output_tokens:
            self._seen = min(self._seen + 1, _MEMORY)
            self._mean += (output_tokens / (call.sampling.n or 1) - self._mean) / self._seen


def _prompt(call: Call) -> int:
    if not call.relayed:
        return len(call.token_ids)
    length = call.headers.get("content-length", "")
    return int(length) // _BYTES_PER_TOKEN if length.isascii() and length.isdecimal() else 0
