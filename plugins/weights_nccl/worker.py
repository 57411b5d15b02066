"""Runs inside vLLM: receives all weights in a trainer's broadcast, and loads them.

    vllm-rs serve MODEL … -- --worker-extension-cls plugins.weights_nccl.worker.BroadcastReceiver

Needs torch and vLLM, and nothing that headrace needs: `PYTHONPATH` of the engine leads to the folder above `plugins`.
"""

# pyright: reportMissingImports=false
# What is missing from this project's environment is in vLLM's.

import json
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed import DistNetworkError, DistStoreError, Store, TCPStore

from plugins.reloading import forget_reload
from plugins.weights_nccl.rounds import Bucket, Group, said

#: Seconds to reach the trainer's store, which is open before a worker hears of it: for a connection, and for torch's greeting over it.
_CONNECT, _GREET = 20.0, 20.0
#: Seconds for an answer of the store.
_ANSWER: Final = 60.0
#: Seconds between two looks whether the trainer has broken off, and for its reason to come when the connection has broken.
_LOOK, _REASON = 0.5, 2.0


class BroadcastFailed(RuntimeError):
    """The weights have not come, or not all of them; the text says why and what this rank has now."""


class BroadcastReceiver:
    """An extension of vLLM's worker; the methods are called through `/collective_rpc`, on every rank."""

    # What vLLM's worker has.
    device: torch.device
    parallel_config: Any
    reload_weights: Any

    _broadcast_group: Group | None = None

    def receive_broadcast(
        self, *, host: str, port: int, number: int, rank_offset: int, world_size: int, timeout: float, stall: float
    ) -> None:
        """Receive all weights and load them, in the trainer's round `number`, whose store is at `host:port`.

        The group has `world_size` ranks. As in vLLM's own protocol, this one's place in it is its rank in its replica, behind the replicas
        with a lower data-parallel rank, behind `rank_offset`. `timeout` is how many seconds the other ranks may take to come, `stall` how
        many one message may take.

        Raises: `BroadcastFailed`. When that happens in the middle, the weights are a mixture until all of them come again.
        """
        parallel = self.parallel_config
        rank = rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        round_ = _Round(f"{host}:{port}", _connect(host, port), number, rank, world_size)
        group, self._broadcast_group = self._broadcast_group, None  # it's taken back when all has gone well
        group = round_.join(group, timeout, stall)
        stream = round_.receive(group, self.device)
        try:
            self.reload_weights(weights_iterator=stream)
        except Exception:
            for _ in stream:  # the other ranks get their messages through this one
                pass
            forget_reload(self)
            raise
        if round_.failure:
            group.abandon()
            raise round_.failure
        self._broadcast_group = group

    def leave_broadcast(self) -> None:
        """Leave the trainer's group, and free what it holds. Nothing happens without one."""
        self._broadcast_group = None


class _Round:
    """This rank's part in a round."""

    def __init__(self, trainer: str, store: Store, number: int, rank: int, size: int) -> None:
        self._trainer = trainer
        self._store = store
        self._number = number
        self._rank = rank
        self._size = size
        self._looked = time.monotonic()
        #: Why the stream ended before its end.
        self.failure: BroadcastFailed | None = None

    def join(self, group: Group | None, timeout: float, stall: float) -> Group:
        """Come, wait for the trainer's word, and be in its group: in this one, if that is it. The weights are not touched.

        Raises: `BroadcastFailed`.
        """
        at_place = group is not None and (group.rank, group.size) == (self._rank, self._size)
        try:
            verb, name = self._word(group.name if group and at_place else "", timeout)
            if verb == "go" and not (group and at_place and group.name == name):
                group = Group(name, self._plan()["backend"], self._store, self._rank, self._size, stall)
        except (RuntimeError, TimeoutError) as error:
            raise BroadcastFailed(f"{self._why(error)}. This rank has the weights that it had") from error
        if group is None or verb != "go":
            raise BroadcastFailed(f"the trainer called it off: {name}. This rank has the weights that it had")
        return group

    def receive(self, group: Group, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """The weights as they come. When something breaks they end, so that vLLM ends its reload properly, and `failure` says what."""
        came, count = 0, self._plan()["buckets"]
        try:
            for came in range(count):
                bucket = Bucket.decode(self._store.get(self._key(f"bucket/{came}")))
                # A new one each time: vLLM keeps what it is given until its layer is complete.
                message = torch.empty(bucket.size, dtype=torch.uint8, device=device if group.backend == "nccl" else "cpu")
                group.broadcast(message, self._demand_trainer)
                yield from bucket.views(message)
        except (RuntimeError, TimeoutError) as error:
            text = f"after {came} of {count} messages: {self._why(error)}. The weights are a mixture now"
            self.failure = BroadcastFailed(text)
            self.failure.__cause__ = error

    def _word(self, has: str, timeout: float) -> tuple[str, str]:
        """Come, with the group of that name, and wait for the trainer's word."""
        self._store.set(self._key("size"), str(self._size))
        self._store.set(self._key(f"here/{self._rank}"), has)
        try:
            self._store.wait([self._key("word")], timedelta(seconds=timeout))
        except DistStoreError as error:
            raise TimeoutError(f"the trainer has waited for others for more than {timeout:g} s") from error
        verb, _, rest = self._store.get(self._key("word")).decode().partition(" ")
        return verb, rest

    def _demand_trainer(self) -> None:
        """Raises: `RuntimeError` when the trainer has broken off, or gone."""
        if time.monotonic() - self._looked > _LOOK:
            self._looked = time.monotonic()
            if self._store.check([self._key("over")]):
                raise RuntimeError("the trainer broke off")

    def _why(self, error: Exception) -> str:
        """What has happened: the trainer's own word about it, if there is one; the store's silence tells of its end."""
        try:
            self._store.wait([self._key("over")], timedelta(seconds=_REASON))
            return f"the trainer broke off: {self._store.get(self._key('over')).decode()}"
        except DistNetworkError:
            return f"the trainer at {self._trainer} has gone"
        except RuntimeError:
            return said(error)

    def _plan(self) -> dict[str, Any]:
        return json.loads(self._store.get(self._key("plan")))

    def _key(self, name: str) -> str:
        return f"{self._number}/{name}"


def _connect(host: str, port: int) -> Store:
    try:
        # torch tries for long where nobody listens, and says a lot about it.
        socket.create_connection((host, port), timeout=_CONNECT).close()
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=_GREET))
    except (RuntimeError, OSError) as error:
        text = f"the trainer at {host}:{port} can't be reached: {said(error)}"
        raise BroadcastFailed(f"{text}. This rank has the weights that it had") from error
    store.set_timeout(timedelta(seconds=_ANSWER))
    return store
