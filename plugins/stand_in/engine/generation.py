"""The tokens of one call: choosing them, their text, and when to stop. It knows nothing of time, pauses and other calls."""

import asyncio
from collections.abc import Callable, Sequence

from plugins.stand_in.engine.call import Finish, Row, Step
from plugins.stand_in.engine.checks import Plan
from plugins.stand_in.engine.model import Context, Distribution
from plugins.stand_in.engine.sampler import Sampler, describe
from plugins.stand_in.engine.stops import StopStrings
from plugins.stand_in.engine.text import Detokenizer
from plugins.stand_in.options import Options

#: Prompt positions described before others get a turn.
_POSITIONS = 256


class Generation:
    """One call under way. `output` has its tokens so far, `finish` its end once there is one.

    `distribution` gives what follows a context under the weights that are loaded at that moment.
    """

    def __init__(self, plan: Plan, options: Options, distribution: Callable[[Context], Distribution]) -> None:
        call, sampling = plan.call, plan.call.sampling
        self.output: list[int] = []
        self.finish: Finish | None = None
        self.cached_tokens = 0
        self._plan = plan
        self._distribution = distribution
        self._eos = None if sampling.ignore_eos else options.eos_token_id
        self._stop_ids = frozenset(sampling.stop_token_ids)
        ends = self._stop_ids if self._eos is None else self._stop_ids | {self._eos}
        self._sampler = Sampler(sampling, ends=ends, vocab_size=options.vocab_size)
        self._context = Context(plan.prompt)
        self._stops = StopStrings(sampling.stop_strings, include=sampling.include_stop_strings)
        self._detokenizer: Detokenizer | None = None
        if call.text or sampling.stop_strings:
            self._detokenizer = Detokenizer(plan.prompt, options.eos_token_id, skip_special=call.skip_special_tokens)
        self._rows: list[Row] = []
        self._versions: list[str] = []
        self._text = ""

    @property
    def pending(self) -> int:
        """How many tokens `take` would return."""
        return len(self._rows)

    async def prompt_rows(self) -> Sequence[Row] | None:
        """The prompt's tokens from the second on, with their logprobs; None when the call doesn't ask."""
        count = self._plan.call.sampling.prompt_logprobs
        if count is None:
            return None
        prompt = self._plan.prompt
        context = Context(prompt[:1])
        rows: list[Row] = []
        for place, token in enumerate(prompt[1:], 1):
            rows.append(describe(self._distribution(context), token, count))
            context.push(token)
            if place % _POSITIONS == 0:
                await asyncio.sleep(0)
        return rows

    def forward(self, version: str) -> None:
        """Make one token, labelled with the weight version."""
        distribution = self._distribution(self._context)
        token = self._sampler.choose(distribution, self._context, self.output)
        self._rows.append(self._sampler.row(distribution, token))
        self._versions.append(version)
        self._context.push(token)
        self.output.append(token)
        self.finish = self._end_by_token(token)
        if self._detokenizer is not None:
            self._read(token, self._detokenizer)

    def abort(self) -> None:
        """End the call where it is."""
        self._text += self._stops.rest()
        self.finish = Finish("abort", len(self.output), self.cached_tokens)

    def take(self) -> Step:
        """What is new since the last time."""
        step = Step(self._rows, self._versions, self._text, self.finish)
        self._rows, self._versions, self._text = [], [], ""
        return step

    def _end_by_token(self, token: int) -> Finish | None:
        made = len(self.output)
        if token == self._eos:
            return Finish("stop", made, self.cached_tokens, eos_token_id=token)
        if token in self._stop_ids:
            return Finish("stop", made, self.cached_tokens, stop_token_id=token)
        if made >= self._plan.max_tokens:
            return Finish("length", made, self.cached_tokens)
        return None

    def _read(self, token: int, detokenizer: Detokenizer) -> None:
        # A stop token has no text. A stop string that its last token completes counts for more than the length.
        stopped = self.finish is not None and self.finish.reason == "stop"
        piece = "" if stopped else detokenizer.push(token)
        made = len(self.output)
        passed, string = self._stops.push(piece, search=made > self._plan.call.sampling.min_tokens)
        self._text += passed
        if string is not None:
            self.finish = Finish("stop", made, self.cached_tokens, stop_string=string)
        elif self.finish is not None:
            self._text += self._stops.rest()
