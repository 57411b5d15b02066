"""Runs inside vLLM: reads a trainer's weights out of its memory, and loads them.

    vllm-rs serve MODEL … -- --worker-extension-cls plugins.weights_nixl.worker.NixlPull

Needs torch, vllm and nixl, and of headrace only that the folder above `plugins` is on `PYTHONPATH`.
"""

# pyright: reportMissingImports=false
# What is missing from this project's environment is in the engine's.

import base64
import math
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from nixl._api import nixl_agent, nixl_agent_config

from plugins.reloading import forget_reload

#: Seconds between two looks at a transfer.
_LOOK_AGAIN = 0.0005
#: A tensor in the trainer's memory: name, dtype, shape, address, and the number of its GPU (0 in main memory).
Remote = tuple[str, str, Sequence[int], int, int]


class PullFailed(Exception):
    """The trainer's memory could not be read; the text says what of it, why, and what this rank has now."""


class NixlPull:
    """An extension of vLLM's worker; the methods are called through `/collective_rpc`, on every rank."""

    # What vLLM's worker has.
    device: torch.device
    reload_weights: Any

    _nixl_puller: "Puller | None" = None

    def pull_weights_nixl(self, agent: str, memory: str, tensors: Sequence[Remote], chunk_bytes: int, timeout: float) -> int:
        """Read all weights and load them; returns the number of bytes read.

        `agent` is the metadata of the trainer's NIXL agent in base64, `memory` where its `tensors` are: `DRAM` or `VRAM`. The tensors are
        those of a checkpoint: every rank reads them whole, and vLLM takes its shard. They are read through a buffer of `chunk_bytes`,
        or as large as the largest of them.

        Raises: `PullFailed` when the trainer can't be reached, or a chunk not be read within `timeout` seconds. When that happens in the
        middle, the weights are a mixture until all of them come again.
        """
        puller = self._nixl_puller = self._nixl_puller or Puller(self.device)
        with puller.connected(base64.b64decode(agent)) as trainer:
            try:
                self.reload_weights(weights_iterator=puller.read(trainer, memory, tensors, chunk_bytes, timeout))
            except Exception:
                forget_reload(self)
                raise
        return sum(_size(tensor) for tensor in tensors)


class Puller:
    """One NIXL agent that reads the memory of others."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # NIXL's progress thread would spin for as long as the worker lives, a core of its own; looking after a transfer drives it, too.
        config = nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self._agent = nixl_agent(f"headrace-{uuid.uuid4().hex}", config)

    @contextmanager
    def connected(self, metadata: bytes) -> Iterator[str]:
        """The name of another agent, which is known for as long."""
        with _explained("the trainer can't be reached", "This rank has the weights that it had"):
            name = self._agent.add_remote_agent(metadata)
        try:
            yield name
        finally:
            self._agent.remove_remote_agent(name)

    def read(
        self, trainer: str, memory: str, tensors: Sequence[Remote], chunk_bytes: int, timeout: float
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each tensor by its name, on this device."""
        chunks = list(in_chunks(tensors, chunk_bytes))
        buffer = torch.empty(max(sum(map(_size, chunk)) for chunk in chunks), dtype=torch.uint8, device=self._device)
        with self._registered(buffer):
            for chunk in chunks:
                self._read_chunk(trainer, memory, chunk, buffer, timeout)
                offset = 0
                for tensor in chunk:
                    name, dtype, shape, *_ = tensor
                    part = buffer[offset : offset + _size(tensor)]
                    offset += _size(tensor)
                    # vLLM keeps what it is given until its layer is complete, and the buffer is filled again before that. A copy is also
                    # aligned for its type.
                    yield name, part.clone().view(_dtype(dtype)).view(tuple(shape))

    def _read_chunk(self, trainer: str, memory: str, chunk: Sequence[Remote], buffer: torch.Tensor, timeout: float) -> None:
        """Read the tensors to where they follow each other in the buffer."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # until what is in the buffer has been copied
        there: list[tuple[int, int, int]] = []
        here: list[torch.Tensor] = []
        offset = 0
        for tensor in chunk:
            _, _, _, address, gpu = tensor
            if size := _size(tensor):
                there.append((address, size, gpu))
                here.append(buffer[offset : offset + size])
                offset += size
        if not there:
            return
        agent = self._agent
        with _explained(f"{chunk[0][0]} and what follows it can't be read", "The weights are a mixture now"):
            handle = agent.initialize_xfer("READ", agent.get_xfer_descs(here), agent.get_xfer_descs(there, memory), trainer)
            try:
                self._wait(handle, timeout)
            finally:
                agent.release_xfer_handle(handle)

    def _wait(self, handle: Any, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        state = self._agent.transfer(handle)
        while state == "PROC":
            if time.monotonic() > deadline:
                raise TimeoutError(f"not done within {timeout:g} s")
            time.sleep(_LOOK_AGAIN)
            state = self._agent.check_xfer_state(handle)
        if state != "DONE":
            raise ConnectionError(f"the transfer ended as {state}")

    @contextmanager
    def _registered(self, buffer: torch.Tensor) -> Iterator[None]:
        registration = self._agent.register_memory([buffer])
        try:
            yield
        finally:
            self._agent.deregister_memory(registration)


@contextmanager
def _explained(what: str, left: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # NIXL's own have no class in common
        raise PullFailed(f"{what}: {type(error).__name__}: {error}. {left}") from error


def in_chunks(tensors: Sequence[Remote], size: int) -> Iterator[list[Remote]]:
    """The tensors in their order, in groups of at most `size` bytes, or of one."""
    chunk: list[Remote] = []
    filled = 0
    for tensor in tensors:
        if chunk and filled + _size(tensor) > size:
            yield chunk
            chunk, filled = [], 0
        chunk.append(tensor)
        filled += _size(tensor)
    if chunk:
        yield chunk


def _size(tensor: Remote) -> int:
    return math.prod(tensor[2]) * _dtype(tensor[1]).itemsize


def _dtype(name: str) -> torch.dtype:
    return getattr(torch, name)
