"""The comparison of policies as a picture."""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from core.simulation.replay import Replay
from core.simulation.report import judge


def plot(replays: Mapping[str, Replay], path: str | Path) -> None:
    """Draw hit rate, balance and latency of each policy into a file whose ending says what kind: `.png`, `.svg`, `.pdf`.

    Raises: `ImportError` without the extra `plot`; `OSError`; `ValueError` for an ending that matplotlib doesn't know.
    """
    figure: Any = import_module("matplotlib.figure").Figure(figsize=(12, 3.6), layout="constrained")
    judgements = {name: judge(replay) for name, replay in replays.items()}
    hits, balance, firsts = figure.subplots(1, 3)
    hits.bar(list(replays), [100 * judgements[name].hit_rate for name in replays])
    hits.set(title="prompt tokens from a cache", ylabel="%")
    balance.bar(list(replays), [judgements[name].imbalance for name in replays])
    balance.axhline(1, color="black", linewidth=0.8)
    balance.set(title="busiest worker ÷ mean")
    for name, replay in replays.items():
        seconds = sorted(timing.first_token - timing.arrived for _, timing in replay.turns)
        firsts.plot(seconds, [(rank + 1) / len(seconds) for rank in range(len(seconds))], label=name)
    firsts.set(title="time to first token", xlabel="seconds", ylabel="share of calls")
    firsts.legend()
    for bars in (hits, balance):
        bars.tick_params(axis="x", rotation=20)
    figure.savefig(path, dpi=120)
