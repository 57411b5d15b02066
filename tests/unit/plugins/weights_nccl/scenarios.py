"""Broadcasts between a real publisher and real receivers, without an engine and with a headrace of a few lines.

Runs in the engine's environment, which has torch: `python -m tests.unit.plugins.weights_nccl.scenarios` plays them all, or those that are
named, and prints what came of each as a line of JSON, `[name, result]`, for `test_rounds.py`.
"""

# pyright: reportMissingImports=false
# What is missing from this project's environment is in the engine's.

import faulthandler
import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from plugins.publishing import PublishFailed
from plugins.weights_nccl import worker as worker_module
from plugins.weights_nccl.trainer import BroadcastPublisher
from plugins.weights_nccl.worker import BroadcastReceiver
from tests.unit.plugins.tensors import same

#: Seconds for a scenario, of which the longest takes five; after that it says where it is, and ends.
_PATIENCE = 200.0

WEIGHTS = {f"layer.{number}": torch.full((1000, 100), float(number)) for number in range(8)}


class Rank(BroadcastReceiver):
    """One rank of a worker, as vLLM has it, with a model of whatever comes."""

    device = torch.device("cpu")

    def __init__(self, rank: int = 0, world_size: int = 1, replica: int = 0) -> None:
        self.parallel_config = SimpleNamespace(rank=rank, world_size=world_size, data_parallel_index=replica)
        self.reloads: list[dict[str, Tensor]] = []
        self.fails_at = ""
        self.forgotten = 0
        self.groups: list[str | None] = []

    def reload_weights(self, weights_iterator: Iterator[tuple[str, Tensor]]) -> None:
        self.reloads.append({})
        for name, tensor in weights_iterator:
            if name == self.fails_at:
                raise KeyError(f"there is no {name} in this model")
            self.reloads[-1][name] = tensor.clone()

    def update(self, kwargs: Mapping[str, Any]) -> None:
        self.receive_broadcast(**kwargs)
        self.groups.append(self._broadcast_group.name if self._broadcast_group else None)


Receive = Callable[[Mapping[str, Any]], None]


class Headrace:
    """Answers what a publisher asks, and lets each worker receive in a thread; `workers` has the ranks of each."""

    def __init__(self, workers: Mapping[str, Sequence[Receive]]) -> None:
        self.workers = dict(workers)
        self.updates: list[dict[str, Any]] = []
        self.left = 0
        self.unreachable = False

    def ask(self, body: Mapping[str, Any]) -> dict[str, Any]:
        progress = {name: {"status": "applying", "reason": ""} for name in self.workers}
        told = {"id": str(len(self.updates)), "status": "running", "error": None, "workers": progress}
        self.updates.append(told)
        threading.Thread(target=self._carry_out, args=(told, body), daemon=True).start()
        return told

    def _carry_out(self, told: dict[str, Any], body: Mapping[str, Any]) -> None:
        options = {key: body[key] for key in ("host", "port", "number", "timeout", "stall")}
        place = {"rank_offset": 1, "world_size": 1 + sum(map(len, self.workers.values()))}
        threads = []
        for name, ranks in self.workers.items():
            for receive in ranks:
                kwargs = {**options, **place}
                threads.append(threading.Thread(target=self._apply, args=(told["workers"][name], receive, kwargs), daemon=True))
            place["rank_offset"] += len(ranks)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        failed = {name: one["reason"] for name, one in told["workers"].items() if one["status"] == "failed"}
        if failed:
            told["error"] = "; ".join(f"{name}: {reason}" for name, reason in failed.items())
        told["status"] = "failed" if failed else "succeeded"

    def _apply(self, progress: dict[str, str], receive: Receive, kwargs: Mapping[str, Any]) -> None:
        try:
            receive(kwargs)
        except Exception as error:  # noqa: BLE001 - as an engine answers
            progress["status"], progress["reason"] = "failed", str(error)


@contextmanager
def served(headrace: Headrace) -> Iterator[str]:
    """Its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if self.path.startswith("/collective_rpc"):
                headrace.left += 1
                self._reply({"results": []})
            else:
                self._reply(headrace.ask(body))

        def do_GET(self) -> None:
            self._reply(headrace.updates[int(self.path.rpartition("/")[2])])

        def _reply(self, content: Any) -> None:
            if headrace.unreachable:
                self.close_connection = True
                return
            data = json.dumps(content).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class calls it so
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()


def publishing(url: str, **options: Any) -> BroadcastPublisher:
    return BroadcastPublisher(url, bucket_mib=0, stall=60.0, timeout=60.0, **options)  # a message for each tensor


def failure(publisher: BroadcastPublisher, weights: Mapping[str, Tensor], version: str) -> PublishFailed:
    try:
        publisher.publish(weights, version)
    except PublishFailed as failed:
        return failed
    raise AssertionError("it did not fail")


@contextmanager
def before_message(number: int, do: Callable[[], Any]) -> Iterator[None]:
    """Something happens to the trainer in the middle of a broadcast."""
    real, count = BroadcastPublisher._message, 0

    def message(self: BroadcastPublisher, bucket: Any, tensors: Any) -> Tensor:
        nonlocal count
        count += 1
        if count == number:
            do()
        return real(self, bucket, tensors)

    BroadcastPublisher._message = message
    try:
        yield
    finally:
        BroadcastPublisher._message = real


def interrupt() -> None:
    raise KeyboardInterrupt


# --- the scenarios ---------------------------------------------------------------------------------------------------------------


def everything_arrives() -> Any:
    """Of any type and shape; three workers of one, two and two ranks, of which the last has its two as replicas."""
    shared = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4)
    weights = {
        "shared": shared,
        "tied": shared,
        "transposed": torch.arange(10, dtype=torch.float32).reshape(2, 5).t(),
        "byte": torch.tensor([1, 2, 3], dtype=torch.uint8),
        "double": torch.tensor([0.1], dtype=torch.float64),
        "eight bits": torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(7, dtype=torch.int64),
        "empty": torch.empty(0, 3),
        "large": torch.randn(1000, 700),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    ranks = [Rank(), Rank(0, 2), Rank(1, 2), Rank(replica=0), Rank(replica=1)]
    update = [rank.update for rank in ranks]
    results = []
    for bucket_mib in (0, 1, 256):
        headrace = Headrace({"a": update[:1], "b": update[1:3], "c": update[3:]})
        with served(headrace) as url, BroadcastPublisher(url, bucket_mib=bucket_mib) as publisher:
            publisher.publish(weights, 1)
        results.append([same({**weights, "parameter": torch.ones(2)}, rank.reloads[-1]) for rank in ranks])
    return results


def groups_last() -> Any:
    """As long as the ranks do: a worker is replaced before the third round, and another one comes before the fourth."""
    a, b, new, more = Rank(), Rank(), Rank(), Rank()
    headrace = Headrace({"a": [a.update], "b": [b.update]})
    keys = []
    with served(headrace) as url, publishing(url) as publisher:
        for version in (1, 2):
            publisher.publish(WEIGHTS, version)
            keys.append(publisher._store.num_keys())
        headrace.workers["b"] = [new.update]
        publisher.publish(WEIGHTS, 3)
        headrace.workers = {"more": [more.update], **headrace.workers}
        publisher.publish(WEIGHTS, 4)
    groups = [[int(str(name).rpartition("-")[2]) for name in rank.groups] for rank in (a, b, new, more)]
    return {"groups": groups, "whole": [same(rank.reloads[-1], WEIGHTS) for rank in (a, new, more)], "left": headrace.left, "keys": keys}


def one_cannot_come() -> Any:
    """Nobody else is touched, and the next time all get the weights."""

    def refuse(_: Mapping[str, Any]) -> None:
        raise RuntimeError("it has no receive_broadcast")

    a, b = Rank(), Rank()
    headrace = Headrace({"a": [a.update], "b": [refuse]})
    with served(headrace) as url, publishing(url) as publisher:
        failed = failure(publisher, WEIGHTS, "1")
        touched = len(a.reloads)
        headrace.workers["b"] = [b.update]
        publisher.publish(WEIGHTS, 2)
    return {"workers": failed.workers, "touched": touched, "whole": [same(rank.reloads[-1], WEIGHTS) for rank in (a, b)]}


def one_cannot_load() -> Any:
    """The other one gets everything all the same, and vLLM forgets what it had begun."""
    a, b = Rank(), Rank()
    worker_module.forget_reload = lambda rank: setattr(rank, "forgotten", rank.forgotten + 1)
    a.fails_at = "layer.3"
    with served(Headrace({"a": [a.update], "b": [b.update]})) as url, publishing(url) as publisher:
        failed = failure(publisher, WEIGHTS, "1")
        b_after_one = same(b.reloads[0], WEIGHTS)
        a.fails_at = ""
        publisher.publish(WEIGHTS, 2)
    return {
        "workers": failed.workers,
        "other": b_after_one,
        "forgotten": [a.forgotten, b.forgotten],
        "whole": [same(rank.reloads[-1], WEIGHTS) for rank in (a, b)],
    }


def the_trainer_cannot_go_on() -> Any:
    """Its own error comes out, and the workers are told."""

    a, b = Rank(), Rank()
    headrace = Headrace({"a": [a.update], "b": [b.update]})
    with served(headrace) as url, publishing(url) as publisher:
        came_out = "nothing"
        with before_message(4, interrupt):
            try:
                publisher.publish(WEIGHTS, "1")
            except KeyboardInterrupt:
                came_out = "KeyboardInterrupt"
        while headrace.updates[0]["status"] == "running":
            time.sleep(0.01)
        publisher.publish(WEIGHTS, "2")
    told = headrace.updates[0]
    return {
        "came out": came_out,
        "reasons": [one["reason"] for one in told["workers"].values()],
        "reloads": [[len(one) for one in rank.reloads] for rank in (a, b)],
        "whole": [same(rank.reloads[-1], WEIGHTS) for rank in (a, b)],
    }


def the_trainer_dies() -> Any:
    """When somebody has come, and in the middle."""
    worker_module._GREET = 3.0
    a, b = Rank(), Rank()
    headrace = Headrace({"a": [a.update], "b": [b.update]})
    with served(headrace) as url:
        for after in (0, 4):
            trainer = multiprocessing.get_context("spawn").Process(target=_die, args=(url, after))
            trainer.start()
            trainer.join()
            while headrace.updates[-1]["status"] == "running":
                time.sleep(0.01)
        with publishing(url) as publisher:
            publisher.publish(WEIGHTS, "2")
    reasons = [[one["reason"] for one in told["workers"].values()] for told in headrace.updates[:2]]
    return {"reasons": reasons, "whole": [same(rank.reloads[-1], WEIGHTS) for rank in (a, b)]}


def die_when_one_has_come(round_: Any, update: Any, group: Any) -> Any:
    while not round_.size():
        update.check()
        time.sleep(0.001)
    os._exit(0)


def _die(url: str, after: int) -> None:
    publisher = publishing(url)
    if after:
        with before_message(after + 1, lambda: os._exit(0)):
            publisher.publish(WEIGHTS, "1")
    publisher._group_of = die_when_one_has_come
    publisher.publish(WEIGHTS, "1")


def a_worker_dies() -> Any:
    """In the middle: the trainer hears of it at once, the other worker too, and without it all goes on."""
    context = multiprocessing.get_context("spawn")
    a = Rank()

    def in_process(kwargs: Mapping[str, Any]) -> None:
        process = context.Process(target=_receive_and_die, args=(dict(kwargs),))
        process.start()
        process.join()
        raise RuntimeError("its connection broke")

    headrace = Headrace({"a": [a.update], "b": [in_process]})
    with served(headrace) as url, publishing(url) as publisher:
        failed = failure(publisher, WEIGHTS, "1")
        del headrace.workers["b"]
        publisher.publish(WEIGHTS, "2")
    return {"workers": failed.workers, "whole": same(a.reloads[-1], WEIGHTS)}


def _receive_and_die(kwargs: Mapping[str, Any]) -> None:
    rank = Rank()

    def die(weights_iterator: Iterator[tuple[str, Tensor]]) -> None:
        for _ in range(4):
            next(weights_iterator)
        os._exit(0)

    rank.reload_weights = die
    rank.receive_broadcast(**kwargs)


def headrace_dies() -> Any:
    """The publisher waits for as long as it is told to, and calls the workers off."""
    came = threading.Event()

    def come_late(kwargs: Mapping[str, Any]) -> None:
        came.wait()
        a.update(kwargs)

    a = Rank()
    headrace = Headrace({"a": [come_late]})
    with served(headrace) as url, publishing(url, patience=1.0) as publisher:
        real = publisher._ask

        def ask(*arguments: Any, **options: Any) -> Any:
            update = real(*arguments, **options)
            headrace.unreachable = True
            return update

        publisher._ask = ask
        failed = failure(publisher, WEIGHTS, "1")
        came.set()
        while headrace.updates[0]["status"] == "running":
            time.sleep(0.01)
    return {"failed": str(failed), "reason": headrace.updates[0]["error"], "touched": len(a.reloads)}


def nobody_answers() -> Any:
    """A receiver neither waits for a store that isn't there nor for a word that doesn't come."""
    worker_module._CONNECT = 1.0
    rank = Rank()
    place = {"number": 1, "rank_offset": 1, "world_size": 2, "timeout": 1.0, "stall": 1.0}
    reasons = []
    with served(Headrace({})) as url, publishing(url) as publisher:
        for port in (1, publisher._store.port):
            try:
                rank.receive_broadcast(host="127.0.0.1", port=port, **place)
            except worker_module.BroadcastFailed as failed:
                reasons.append(str(failed))
    return reasons


def a_shard_is_refused() -> Any:
    """Before anybody is asked."""

    class Shard:
        def full_tensor(self) -> None:
            pass

    headrace = Headrace({})
    with served(headrace) as url, publishing(url) as publisher:
        try:
            publisher.publish({"w": Shard()}, "1")  # pyright: ignore[reportArgumentType]
        except TypeError as error:
            return {"error": str(error), "asked": len(headrace.updates)}


SCENARIOS: tuple[Callable[[], Any], ...] = (
    everything_arrives,
    groups_last,
    one_cannot_come,
    one_cannot_load,
    the_trainer_cannot_go_on,
    the_trainer_dies,
    a_worker_dies,
    headrace_dies,
    nobody_answers,
    a_shard_is_refused,
)

if __name__ == "__main__":
    for scenario in SCENARIOS:
        if scenario.__name__ in (sys.argv[1:] or scenario.__name__):
            faulthandler.dump_traceback_later(_PATIENCE, exit=True)
            print(json.dumps([scenario.__name__, scenario()]), flush=True)
