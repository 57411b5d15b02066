"""A real publisher and real pullers over NIXL, without an engine and without a headrace.

Runs in the engine's environment, which has torch: `python -m tests.unit.plugins.weights_nixl.scenarios NAME` prints what came of the
scenario as a line of JSON, for `test_pulling.py`.
"""

# pyright: reportMissingImports=false
# What is missing from this project's environment is in the engine's.

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from plugins.weights_nixl import worker as worker_module
from plugins.weights_nixl.trainer import NixlPublisher
from plugins.weights_nixl.worker import NixlPull, PullFailed
from tests.unit.plugins.tensors import same

WEIGHTS = {f"layer.{number}": torch.full((1000, 100), float(number)) for number in range(8)}
#: Of one of these layers.
SIZE = 400_000

#: Ranks that had to forget a reload; vLLM itself isn't here.
FORGOTTEN: list[Any] = []
worker_module.forget_reload = FORGOTTEN.append


class Rank(NixlPull):
    """One rank of a worker, as vLLM has it, with a model of whatever comes; `on_weight` is called before each weight is taken."""

    device = torch.device("cpu")

    def __init__(self, on_weight: Callable[[str], None] = lambda _: None) -> None:
        self.on_weight = on_weight
        self.reloads: list[dict[str, Tensor]] = []

    def reload_weights(self, weights_iterator: Iterator[tuple[str, Tensor]]) -> None:
        self.reloads.append({})
        for name, tensor in weights_iterator:
            self.on_weight(name)
            self.reloads[-1][name] = tensor  # kept without a copy, as vLLM does


def offered_to(ask: Callable[[dict[str, Any]], object]) -> NixlPublisher:
    """A publisher; `ask` is called with the transport's keys instead of headrace, and answers when the update has ended."""
    publisher = NixlPublisher("http://nowhere")
    publisher._ask = lambda _, **options: SimpleNamespace(wait=lambda: ask(options))  # pyright: ignore[reportAttributeAccessIssue]
    return publisher


def pull(rank: Rank, options: Mapping[str, Any], *, chunk_bytes: int = SIZE, timeout: float = 20.0) -> int:
    return rank.pull_weights_nixl(**json.loads(json.dumps(options)), chunk_bytes=chunk_bytes, timeout=timeout)


def failure(rank: Rank, options: Mapping[str, Any], **limits: Any) -> str:
    try:
        pull(rank, options, **limits)
    except PullFailed as failed:
        return str(failed)
    raise AssertionError("it did not fail")


# --- the scenarios ---------------------------------------------------------------------------------------------------------------


def everything_arrives() -> Any:
    """Of any type and shape, through buffers of several sizes, at two ranks; and the bytes that they say."""
    shared = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4)
    weights = {
        "byte": torch.tensor([1, 2, 3], dtype=torch.uint8),
        "double": torch.tensor([0.1], dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "shared": shared,
        "tied": shared,
        "transposed": torch.arange(10, dtype=torch.float32).reshape(2, 5).t(),
        "eight bits": torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(7, dtype=torch.int64),
        "large": torch.randn(1000, 700),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    ranks = [Rank(), Rank()]
    results = []
    for chunk_bytes in (1, 30, 1 << 30):
        sizes: list[int] = []
        offered_to(lambda options: sizes.extend(pull(rank, options, chunk_bytes=chunk_bytes) for rank in ranks)).publish(weights, 1)  # noqa: B023
        results.append([sizes, [same(rank.reloads[-1], weights) for rank in ranks]])
    return {"size": sum(tensor.nbytes for tensor in weights.values()), "results": results}


def weights_change() -> Any:
    """In place between updates, as an optimizer does it, with one publisher: each rank has what was there at the time."""
    weights = {name: tensor.clone() for name, tensor in WEIGHTS.items()}
    rank = Rank()
    publisher = offered_to(lambda options: pull(rank, options))
    for version in range(3):
        for tensor in weights.values():
            tensor.add_(1)
        publisher.publish(weights, version)
    return [same(got, {name: tensor + 1 + version for name, tensor in WEIGHTS.items()}) for version, got in enumerate(rank.reloads)]


def wrong_address() -> Any:
    """A tensor in the middle isn't where it is said to be."""
    rank = Rank()

    def ask(options: dict[str, Any]) -> None:
        options["tensors"][3][3] = 4096
        reasons.append(failure(rank, options))

    reasons: list[str] = []
    offered_to(ask).publish(WEIGHTS, 1)
    return {"reasons": reasons, "forgotten": len(FORGOTTEN) == 1 and FORGOTTEN[0] is rank}


def the_trainer_dies() -> Any:
    """Before anybody has come, and in the middle."""
    before, middle = Rank(), Rank(on_weight=lambda name: dying.die() if name == "layer.3" else None)
    dying = Trainer()
    dying.die()
    reasons = [failure(before, dying.options)]
    dying = Trainer()
    reasons.append(failure(middle, dying.options))
    for rank in (before, middle):
        rank.on_weight = lambda _: None
        offered_to(lambda options: pull(rank, options)).publish(WEIGHTS, 2)  # noqa: B023
    return {"reasons": reasons, "whole": [same(rank.reloads[-1], WEIGHTS) for rank in (before, middle)]}


def the_trainer_hangs() -> Any:
    """Over TCP, where it has to take part in a transfer: a rank loses patience."""
    os.environ["UCX_TLS"] = "tcp"
    hanging = Trainer()
    rank = Rank(on_weight=lambda name: hanging.hang() if name == "layer.3" else None)
    reason = failure(rank, hanging.options, timeout=1.0)
    hanging.die()
    return reason


def what_is_refused() -> Any:
    """Before anybody is asked."""

    class Shard:
        def full_tensor(self) -> None:
            pass

    asked: list[Any] = []
    publisher = offered_to(asked.append)
    errors = []
    for weights in ({"w": Shard()}, {"w": torch.ones(1), "v": torch.ones(1, device="meta")}, {}):
        try:
            publisher.publish(weights, 1)  # pyright: ignore[reportArgumentType]
        except (TypeError, ValueError) as error:
            errors.append(f"{type(error).__name__}: {error}")
    return {"errors": errors, "asked": len(asked)}


class Trainer:
    """A process that offers the weights and waits."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        self._process = context.Process(target=_offer, args=(there,), daemon=True)
        self._process.start()
        self.options: dict[str, Any] = here.recv()

    def die(self) -> None:
        self._process.kill()
        self._process.join()

    def hang(self) -> None:
        assert self._process.pid
        os.kill(self._process.pid, signal.SIGSTOP)
        os.waitpid(self._process.pid, os.WUNTRACED)


def _offer(there: Connection) -> None:
    def ask(options: dict[str, Any]) -> None:
        there.send(options)
        time.sleep(600)

    offered_to(ask).publish(WEIGHTS, 1)


if __name__ == "__main__":
    print("result:", json.dumps(globals()[sys.argv[1]]()), flush=True)
