"""The rewards of a run as a picture: `python -m examples.train.plot rewards.jsonl reward.png`."""

import json
import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot
from matplotlib.ticker import MaxNLocator


def plot(log: Path, picture: Path, title: str = "") -> None:
    """Draw what `train.py` has logged, as a PNG file."""
    steps = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    figure, axes = pyplot.subplots(figsize=(6.4, 3.2), dpi=100, layout="constrained")
    axes.plot([step["step"] for step in steps], [step["reward"] for step in steps], color="#1f77b4", linewidth=2)
    axes.set(xlabel="step", ylabel="share of vowels", ylim=(0, 1.02), title=title)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture)
    pyplot.close(figure)


if __name__ == "__main__":
    plot(Path(sys.argv[1]), Path(sys.argv[2]))
