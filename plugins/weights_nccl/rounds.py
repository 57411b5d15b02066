"""How a trainer and every rank of every worker meet for one broadcast of all weights: a round.

The trainer's process keeps a store (torch's `TCPStore`), in which round `n` has these keys:

* `n/bucket/<i>`: what the i-th message holds, by the trainer before anybody is asked; `n/plan` says how many there are, and over what;
* `n/size`: the ranks of the group, the trainer's among them, which is the first; by every rank that comes;
* `n/here/<rank>`: the rank has come; the name of the group that it has from an earlier round, at this place;
* `n/word`: the trainer's word when all have come: `go <group>`, or `off <reason>` instead;
* `n/over`: why the trainer broke off after that.

Nobody waits in a collective call for who might never come: a rank that has come waits for the trainer's word, and the trainer gives it when
it has seen all of them. Whoever dies takes its connections along, and the others see that. A group is used again in the next round when
all ranks have it, and never after a failure.
"""

# pyright: reportMissingImports=false
# What is missing from this project's environment is in vLLM's and in the trainer's.

import contextlib
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, Store

Backend = Literal["nccl", "gloo"]

#: Tensors begin at multiples of this many bytes, so that a view has any dtype.
_ALIGNMENT: Final = 16


class Entry(NamedTuple):
    """A tensor in a message, `offset` bytes after its beginning."""

    name: str
    dtype: str
    shape: list[int]
    offset: int


class Bucket(NamedTuple):
    """What one message of `size` bytes holds."""

    entries: list[Entry]
    size: int

    def encode(self) -> bytes:
        """For the store."""
        return json.dumps(self).encode()

    @classmethod
    def decode(cls, data: bytes) -> "Bucket":
        """From the store."""
        entries, size = json.loads(data)
        return cls([Entry(*entry) for entry in entries], size)

    def views(self, message: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The tensors, by their names, where they lie in the message."""
        for name, dtype_name, shape, offset in self.entries:
            dtype = getattr(torch, dtype_name)
            size = dtype.itemsize * torch.Size(shape).numel()
            yield name, message[offset : offset + size].view(dtype).view(shape)


def said(error: BaseException) -> str:
    """What an error of torch says, without the place in its source and without its advice."""
    text = re.sub(r"^\[\S+\] ", "", str(error).strip())
    return text.partition("\n")[0].partition(". ")[0].rstrip(".") or type(error).__name__


def in_buckets(weights: Mapping[str, Tensor], size: int) -> list[Bucket]:
    """The tensors in their order, in buckets of at most `size` bytes, or of one tensor that is larger."""
    buckets: list[Bucket] = []
    entries: list[Entry] = []
    filled = 0
    for name, tensor in weights.items():
        if entries and filled + tensor.nbytes > size:
            buckets.append(Bucket(entries, filled))
            entries, filled = [], 0
        entries.append(Entry(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), filled))
        filled += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    if entries:
        buckets.append(Bucket(entries, filled))
    return buckets


class Group:
    """A process group apart from torch's default one, which vLLM and the trainer have for themselves. The trainer is rank 0.

    `stall` is how many seconds one message may take. The constructor returns when all ranks have called it.
    """

    def __init__(self, name: str, backend: Backend, store: Store, rank: int, size: int, stall: float) -> None:
        self.name, self.backend, self.rank, self.size = name, backend, rank, size
        self._stall = stall
        of_group = PrefixStore(f"group/{name}", store)
        if backend == "nccl":
            from torch.distributed import ProcessGroupNCCL  # a torch without CUDA has none

            options = ProcessGroupNCCL.Options()
            # Its watchdog ends the whole process; `broadcast` gives up long before.
            options._timeout = timedelta(seconds=2 * stall)
            self._group: Any = ProcessGroupNCCL(of_group, rank, size, options)
        else:
            self._group = ProcessGroupGloo(of_group, rank, size, timedelta(seconds=stall))

    def broadcast(self, message: Tensor, check: Callable[[], None]) -> None:
        """Send the message, or receive it in place. `check` is called all along, and raises to give it up.

        Raises: `RuntimeError` when a rank has gone; `TimeoutError`; what `check` raises. The group can't be used after that.
        """
        options = BroadcastOptions()
        options.rootRank = 0
        work = self._group.broadcast([message], options)
        deadline, pause = time.monotonic() + self._stall, 0.0001
        while not work.is_completed():
            check()
            if time.monotonic() > deadline:
                raise TimeoutError(f"a message of {message.nbytes:,} bytes took more than {self._stall:g} s")
            time.sleep(pause)
            pause = min(2 * pause, 0.005)
        work.wait()

    def abandon(self) -> None:
        """Break off what is under way. With gloo that takes until the message is through, or a rank has gone, or `stall` seconds."""
        with contextlib.suppress(RuntimeError):
            self._group.abort()
