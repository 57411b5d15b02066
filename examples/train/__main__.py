"""The whole example on this machine: two real vLLM workers on the CPU, headrace before them, and `train.py`.

`python -m examples.train [--transport filesystem|broadcast|nixl] [--folder FOLDER] [arguments of train.py]`. The folder, `train-out` by
default, gets `rewards.jsonl` and `reward.png`, and what the workers and headrace had to say stays out of the way unless something fails.
"""

import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from examples.train.plot import plot
from tests import workers
from tests.proxy import headrace
from tests.workers import components

_PROJECT = Path(__file__).parents[2]


def main() -> int:
    """Run it; returns the trainer's exit status."""
    parser = argparse.ArgumentParser(prog="python -m examples.train", description="Train a tiny model on this machine.")
    parser.add_argument("--transport", choices=["filesystem", "broadcast", "nixl"], default="filesystem")
    parser.add_argument("--folder", type=Path, default=Path("train-out"))
    ours, trainers = parser.parse_known_args()
    if reason := components.why_not("nixl"):
        print(f"no real workers here: {reason}", file=sys.stderr)
        return 1
    folder: Path = ours.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    log, picture = folder / "rewards.jsonl", folder / "reward.png"
    allowed = f'[plugins.weights-filesystem]\nallowed_paths = ["{folder}"]'
    with ExitStack() as stack:
        print("starting two vLLM engines on the CPU, which takes about a minute", flush=True)
        with ThreadPoolExecutor() as pool:
            engines = [started.result() for started in [pool.submit(stack.enter_context, workers.receiving_engine()) for _ in range(2)]]
        proxy = stack.enter_context(headrace(*engines, settings=allowed))
        print(f"headrace serves both at {proxy.url}", flush=True)
        model = str(workers.checkpoint(0))
        transport = ["--transport", ours.transport, "--folder", str(folder / "weights")]
        status = _in_engine_environment(["--url", proxy.url, "--model", model, "--log", str(log), *transport, *trainers])
    if status == 0:
        plot(log, picture, title=f"two workers, weights over {ours.transport}")
        print(f"drawn: {picture}", flush=True)
    return status


def _in_engine_environment(arguments: list[str]) -> int:
    """Run the trainer where torch is."""
    path = os.pathsep.join([str(_PROJECT), str(components.nixl_packages())])
    quiet = {"NIXL_LOG_LEVEL": "WARN", "TQDM_DISABLE": "1"}
    variables = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **quiet}
    python = components.engine_environment() / "bin" / "python"
    return subprocess.run([python, "-m", "examples.train.train", *arguments], env=os.environ | variables, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
