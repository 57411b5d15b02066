"""Traces of reinforcement learning: groups of rollouts from one prompt, of one turn or of many."""

import random
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import Annotated

from msgspec import Meta, Struct

from core.simulation.trace import BLOCK_SIZE, Turn

_Count = Annotated[int, Meta(ge=1, le=1_000_000)]
_Tokens = Annotated[int, Meta(ge=0, le=1_000_000)]
_Seconds = Annotated[float, Meta(ge=0, le=1_000_000)]


class Workload(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is rolled out. Lengths are in tokens; those of outputs and of tools' answers are lognormal around their medians."""

    #: Training steps; each has a policy version, and so a salt, of its own.
    steps: _Count = 4
    #: Seconds from one step's prompts to the next one's.
    step_seconds: _Seconds = 60.0
    #: Prompts in a step.
    groups: _Count = 32
    #: Rollouts of each prompt, all at once.
    rollouts: _Count = 8
    turns: _Count = 1
    #: At the head of every prompt: the instructions, the tools.
    shared_tokens: _Tokens = 1024
    prompt_tokens: _Tokens = 1024
    output_tokens: _Tokens = 512
    #: What a tool answers between two turns, and how long it takes at the median, in seconds.
    tool_tokens: _Tokens = 256
    tool_seconds: _Seconds = 2.0

    def trace(self, seed: int = 0) -> Iterator[Turn]:
        """The turns; the same for the same seed."""
        dice = random.Random(seed)  # noqa: S311 - nothing is secret here
        hashes = count(1)
        for step in range(self.steps):
            shared = _blocks(self.shared_tokens, hashes)
            for group in range(self.groups):
                prompt = shared + _blocks(_around(dice, self.prompt_tokens), hashes)
                for rollout in range(self.rollouts):
                    yield from self._session(f"{step}.{group}.{rollout}", step, prompt, hashes, dice)

    def _session(self, name: str, step: int, prompt: list[int], hashes: Iterator[int], dice: random.Random) -> Iterator[Turn]:
        blocks = prompt
        for turn in range(self.turns):
            output = _around(dice, self.output_tokens)
            said = _blocks(output, hashes)
            yield Turn(
                session=name,
                at=step * self.step_seconds if turn == 0 else None,
                after=0.0 if turn == 0 else dice.lognormvariate(0, 0.8) * self.tool_seconds,
                blocks=blocks,
                output_blocks=said,
                prompt_tokens=len(blocks) * BLOCK_SIZE,
                output_tokens=output,
                salt=str(step),
            )
            blocks = blocks + said + _blocks(_around(dice, self.tool_tokens), hashes)


def _around(dice: random.Random, median: int) -> int:
    return max(1, round(median * dice.lognormvariate(0, 0.6)))


def _blocks(tokens: int, hashes: Iterator[int]) -> list[int]:
    """New blocks for so many tokens."""
    return [next(hashes) for _ in range(tokens // BLOCK_SIZE)]


#: The workloads that `headrace simulate --workload` knows.
WORKLOADS: Mapping[str, Callable[[], Workload]] = {
    "rollouts": Workload,
    "agents": lambda: Workload(steps=2, step_seconds=240.0, groups=24, turns=8, shared_tokens=2048, output_tokens=256),
}
