"""The trainer's end of a broadcast: rank 0 of a group with every rank of every worker."""

# pyright: reportMissingImports=false
# What is missing from this project's environment is in the trainer's.

import json
import secrets
import socket
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final
from urllib.parse import urlsplit

import torch
from torch import Tensor
from torch.distributed import TCPStore

from plugins.publishing import Publisher, PublishFailed, Update, whole
from plugins.weights_nccl.rounds import Backend, Bucket, Group, in_buckets, said

#: Seconds between two looks who has come.
_LOOK: Final = 0.002
#: Of the store's own operations, in seconds; it lies in this process.
_STORE: Final = 60.0
#: For the workers to leave at the end, in seconds.
_LEAVE: Final = 10.0


class BroadcastPublisher(Publisher):
    """Broadcasts the weights to workers that run `plugins.weights_nccl.worker.BroadcastReceiver`.

    The workers find this process at `host:port`: by default at the address from which headrace is reached, at a free port, without any
    authentication. `backend` is by default `nccl` where torch has a GPU, and `gloo` elsewhere. The tensors travel in messages of
    `bucket_mib` MiB; `stall` is how many seconds one may take, and `timeout` how many a worker waits for the others to come. `options` are
    those of `Publisher`.
    """

    transport = "broadcast"

    def __init__(
        self,
        url: str,
        *,
        host: str = "",
        port: int = 0,
        backend: Backend | None = None,
        bucket_mib: int = 256,
        stall: float = 300.0,
        timeout: float = 1800.0,
        **options: Any,
    ) -> None:
        super().__init__(url, **options)
        self._backend: Backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
        self._bucket_bytes = bucket_mib << 20
        self._stall = stall
        self._store = TCPStore("localhost", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=_STORE))
        self._fixed |= {"host": host or _own_address(url), "port": self._store.port, "timeout": timeout, "stall": stall}
        self._names = secrets.token_hex(4)
        self._round = _Round(self._store, 0)
        self._group: Group | None = None

    def publish(self, weights: Mapping[str, Tensor], version: str | int) -> None:
        """See `Publisher`."""
        tensors = whole(weights)
        self._round.forget()  # only now: whoever failed in it may have read it later
        round_ = self._round = _Round(self._store, self._round.number + 1)
        round_.plan(in_buckets(tensors, self._bucket_bytes), self._backend)
        update = self._ask(version, number=round_.number)
        group, self._group = self._group, None  # it's taken back when all has gone well
        try:
            group = self._group_of(round_, update, group)
            for bucket in round_.buckets:
                group.broadcast(self._message(bucket, tensors), update.check)
        except BaseException as error:
            round_.break_off(said(error))
            if group:
                group.abandon()
            if not isinstance(error, (RuntimeError, TimeoutError, PublishFailed)):
                raise
            # Of a connection that broke torch doesn't know whose it was, and headrace does.
        else:
            self._group = group
        update.wait()

    def close(self) -> None:
        """See `Publisher`."""
        if self._group:
            self._tell_workers("leave_broadcast", _LEAVE)  # for their memory; the next trainer's group would free it, too
        self._group = None
        super().close()

    def _group_of(self, round_: "_Round", update: Update, group: Group | None) -> Group:
        """Wait until all ranks have come, give the word, and be in the group: in the last one, if all have it."""
        while not (size := round_.size()) or not round_.is_complete(size):
            update.check()
            if update.has_ended:
                raise PublishFailed("the update has ended, and nobody has come for the weights")
            time.sleep(_LOOK)
        if group and group.size == size and all(has == group.name for has in round_.names(size)):
            round_.go(group.name)
            return group
        name = f"{self._names}-{round_.number}"
        round_.go(name)
        return Group(name, self._backend, self._store, 0, size, self._stall)

    def _message(self, bucket: Bucket, tensors: Mapping[str, Tensor]) -> Tensor:
        message = torch.empty(bucket.size, dtype=torch.uint8, device="cuda" if self._backend == "nccl" else "cpu")
        for name, place in bucket.views(message):
            place.copy_(tensors[name])
        return message


class _Round:
    """The trainer's part in a round: what it writes into its store, and reads."""

    def __init__(self, store: TCPStore, number: int) -> None:
        self._store = store
        self.number = number
        self.buckets: list[Bucket] = []
        self._size = 0
        self._is_on = False

    def plan(self, buckets: list[Bucket], backend: Backend) -> None:
        """Say what will come."""
        self.buckets = buckets
        for index, bucket in enumerate(buckets):
            self._store.set(self._key(f"bucket/{index}"), bucket.encode())
        self._store.set(self._key("plan"), json.dumps({"buckets": len(buckets), "backend": backend}))

    def size(self) -> int:
        """Of the group; 0 while nobody has come."""
        if not self._size and self._store.check([self._key("size")]):
            self._size = int(self._store.get(self._key("size")))
        return self._size

    def is_complete(self, size: int) -> bool:
        """Whether every rank has come."""
        return self._store.check([self._key(f"here/{rank}") for rank in range(1, size)])

    def names(self, size: int) -> list[str]:
        """Of the groups that the ranks have from earlier rounds."""
        return [self._store.get(self._key(f"here/{rank}")).decode() for rank in range(1, size)]

    def go(self, name: str) -> None:
        """Let it begin, in the group of that name."""
        self._is_on = True
        self._store.set(self._key("word"), f"go {name}")

    def break_off(self, reason: str) -> None:
        """Let nobody wait any more."""
        if self._is_on:
            self._store.set(self._key("over"), reason)
        else:
            self._store.set(self._key("word"), f"off {reason}")

    def forget(self) -> None:
        """Take everything out of the store."""
        names = ["size", "word", "over", "plan", *(f"bucket/{index}" for index in range(len(self.buckets)))]
        for name in [*names, *(f"here/{rank}" for rank in range(1, self._size))]:
            self._store.delete_key(self._key(name))

    def _key(self, name: str) -> str:
        return f"{self.number}/{name}"


def _own_address(url: str) -> str:
    """The address that this machine has towards that of the URL. Nothing is sent."""
    where = urlsplit(url)
    family, _, _, _, address = socket.getaddrinfo(where.hostname, where.port or 80, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return probe.getsockname()[0]
