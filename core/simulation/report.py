"""What a policy is judged by, out of a replay."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from msgspec import Struct

from core.simulation.replay import Replay


class Judgement(Struct, frozen=True):
    """Times are in seconds of the simulated fleet."""

    calls: int
    failed: int
    #: Share of the prompt tokens that came from a prefix cache, 0 to 1.
    hit_rate: float
    #: Tokens that the busiest worker has computed, over those of the average worker; 1 is perfect.
    imbalance: float
    #: From arrival to the prefill.
    queued_p50: float
    queued_p99: float
    #: From arrival to the first token, and to the last.
    first_token_p50: float
    first_token_p99: float
    seconds_p50: float
    seconds_p99: float
    #: From the first arrival to the last end.
    makespan: float


def judge(replay: Replay) -> Judgement:
    """The numbers of a replay; zeros when nothing was answered."""
    timings = [timing for _, timing in replay.turns]
    prompt = sum(turn.prompt_tokens for turn, _ in replay.turns)
    queued = [timing.prefilled - timing.arrived for timing in timings]
    first = [timing.first_token - timing.arrived for timing in timings]
    seconds = [timing.ended - timing.arrived for timing in timings]
    computed = list(replay.computed_tokens.values())
    return Judgement(
        calls=len(timings),
        failed=sum(replay.failures.values()),
        hit_rate=sum(timing.cached_tokens for timing in timings) / prompt if prompt else 0.0,
        imbalance=max(computed) / fmean(computed) if any(computed) else 0.0,
        queued_p50=_quantile(queued, 0.5),
        queued_p99=_quantile(queued, 0.99),
        first_token_p50=_quantile(first, 0.5),
        first_token_p99=_quantile(first, 0.99),
        seconds_p50=_quantile(seconds, 0.5),
        seconds_p99=_quantile(seconds, 0.99),
        makespan=max((timing.ended for timing in timings), default=0.0) - min((timing.arrived for timing in timings), default=0.0),
    )


def table(judgements: Mapping[str, Judgement]) -> str:
    """A line for each policy, as Markdown."""
    rows = [
        "| policy | hit rate | busiest ÷ mean | queued p50 / p99 s | first token p50 / p99 s | whole p50 / p99 s | makespan s |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, it in judgements.items():
        times = ((it.queued_p50, it.queued_p99), (it.first_token_p50, it.first_token_p99), (it.seconds_p50, it.seconds_p99))
        pairs = " | ".join(f"{low:.2f} / {high:.2f}" for low, high in times)
        failed = f" ({it.failed} of {it.calls + it.failed} failed)" if it.failed else ""
        rows.append(f"| {name}{failed} | {it.hit_rate:.1%} | {it.imbalance:.2f} | {pairs} | {it.makespan:.1f} |")
    return "\n".join(rows)


def _quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that this share of the values doesn't exceed; 0 of none."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else 0.0
