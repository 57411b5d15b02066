"""A fleet of two real engines, and a trainer that trains: after each step both say what the trainer's own model says."""

import json
import select
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests import workers
from tests.e2e.prompts import LENGTH, PROMPTS
from tests.workers import RunningWorker
from tests.workers.modules import in_engine

_PATIENCE = 180


class RunningTrainer:
    """`tests.e2e.training` in its process."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process = process
        self._log = log

    def begin(self, version: str) -> None:
        """Let it take a step and publish."""
        assert self.process.stdin
        self.process.stdin.write(f"{version}\n")
        self.process.stdin.flush()

    def end(self) -> dict[str, Any]:
        """What it says when it has."""
        assert self.process.stdout
        deadline = time.monotonic() + _PATIENCE
        while not select.select([self.process.stdout], [], [], 1)[0]:
            assert time.monotonic() < deadline, "the trainer says nothing"
            assert self.process.poll() is None, self._log.read_text()
        line = self.process.stdout.readline()
        assert line, self._log.read_text()
        return json.loads(line)

    def step(self, version: str) -> list[list[int]]:
        """Take a step and publish; what the trainer's model says to each prompt then."""
        self.begin(version)
        answer = self.end()
        assert "error" not in answer, answer
        assert answer["version"] == version
        return answer["said"]


@contextmanager
def training(url: str, publisher: str, folder: Path) -> Iterator[RunningTrainer]:
    """Run a trainer that publishes to the headrace at `url`."""
    log = folder / "trainer.log"
    command = in_engine("tests.e2e.training", url, publisher, workers.checkpoint(0), folder, nixl=True)
    with log.open("w") as errors:
        process = subprocess.Popen(**command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True)
    with process:
        try:
            yield RunningTrainer(process, log)
            if process.poll() is None:
                process.communicate(timeout=30)
                assert process.returncode == 0, log.read_text()
        finally:
            process.kill()


def says(worker: RunningWorker) -> list[list[int]]:
    """What the worker itself says to each of the trainer's prompts. Nothing comes from a cache of earlier weights."""
    sampling = {"max_tokens": LENGTH, "temperature": 0.0, "ignore_eos": True, "skip_reading_prefix_cache": True}
    bodies = [{"token_ids": list(prompt), "sampling_params": sampling} for prompt in PROMPTS]
    replies = [httpx.post(f"{worker.http}/inference/v1/generate", json=body, timeout=60).raise_for_status() for body in bodies]
    return [reply.json()["choices"][0]["token_ids"] for reply in replies]
