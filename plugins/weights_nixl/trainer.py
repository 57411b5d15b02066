"""Runs in the trainer: lets every worker read the weights out of this process's memory. Needs torch, httpx and nixl."""

# pyright: reportMissingImports=false
# What is missing from this project's environment is in the trainer's.

import base64
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from nixl._api import nixl_agent, nixl_agent_config

from plugins.publishing import Publisher, whole


class NixlPublisher(Publisher):
    """Lets the workers read the tensors where they are: all of them on GPUs, or all in main memory.

    The workers run `plugins.weights_nixl.worker.NixlPull`. `options` are `Publisher`'s.
    """

    transport = "nixl"

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(url, **options)
        self._agent = nixl_agent(f"headrace-trainer-{uuid.uuid4().hex}", nixl_agent_config(backends=["UCX"]))

    def publish(self, weights: Mapping[str, torch.Tensor], version: str | int) -> None:
        """See `Publisher`. Nothing may write to the tensors meanwhile. Raises: `ValueError` when some are on GPUs and others not."""
        tensors = {name: tensor.contiguous() for name, tensor in whole(weights).items()}
        kinds = {tensor.device.type for tensor in tensors.values()}
        if kinds not in ({"cpu"}, {"cuda"}):
            raise ValueError(f"weights on {' and '.join(sorted(kinds)) or 'no device'}; all have to be on cuda, or all on cpu")
        if kinds == {"cuda"}:
            for gpu in {tensor.device for tensor in tensors.values()}:
                torch.cuda.synchronize(gpu)  # who reads doesn't wait for any stream
        with self._readable(tensors) as metadata:
            self._ask(
                version,
                agent=base64.b64encode(metadata).decode(),
                memory="VRAM" if kinds == {"cuda"} else "DRAM",
                tensors=[_described(name, tensor) for name, tensor in tensors.items()],
            ).wait()

    @contextmanager
    def _readable(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[bytes]:
        """What others need to know to read these."""
        once = {(tensor.data_ptr(), tensor.nbytes): tensor for tensor in tensors.values() if tensor.nbytes}  # tied weights have two names
        registration = self._agent.register_memory(list(once.values()))
        try:
            yield self._agent.get_agent_metadata()
        finally:
            self._agent.deregister_memory(registration)


def _described(name: str, tensor: torch.Tensor) -> list[Any]:
    """A tensor as `plugins.weights_nixl.worker.Remote`."""
    gpu = max(tensor.get_device(), 0)
    return [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), tensor.data_ptr(), gpu]
