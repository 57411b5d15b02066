"""A trainer of the tiny model, as a process of its own: a step, its weights published, what the model then says.

`python -m tests.e2e.training URL PUBLISHER CHECKPOINT FOLDER`, in the engine's environment, which has torch. For each line on its standard
input, a version, it takes a step and publishes; it answers with a line of JSON, `{"version", "said": [tokens of each prompt]}` or
`{"error", "workers"}`. A version "misshapen" has a tensor that doesn't fit; in the middle of "deadly" a broadcast's trainer dies.
"""

# pyright: reportMissingImports=false
# What is missing from this project's environment is in the engine's.

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from plugins.publishing import Publisher, PublishFailed
from tests.e2e.prompts import LENGTH, PROMPTS


def filesystem(url: str, folder: Path) -> Publisher:
    from plugins.weights_filesystem.trainer import FilesystemPublisher

    return FilesystemPublisher(url, folder)


def broadcast(url: str, folder: Path) -> Publisher:
    from plugins.weights_nccl.trainer import BroadcastPublisher

    class Mortal(BroadcastPublisher):
        def publish(self, weights: Mapping[str, Tensor], version: str | int) -> None:
            self._messages_left = 12 if version == "deadly" else -1
            super().publish(weights, version)

        def _message(self, bucket: Any, tensors: Any) -> Tensor:
            self._messages_left -= 1
            if not self._messages_left:
                os._exit(3)
            return super()._message(bucket, tensors)

    # A message for each tensor, so that the weights of a layer come in several.
    return Mortal(url, host="127.0.0.1", bucket_mib=0)


def nixl(url: str, folder: Path) -> Publisher:
    from plugins.weights_nixl.trainer import NixlPublisher

    return NixlPublisher(url)


PUBLISHERS: dict[str, Callable[[str, Path], Publisher]] = {"filesystem": filesystem, "broadcast": broadcast, "nixl": nixl}


class Trainer:
    """The model with an optimizer that changes it visibly."""

    def __init__(self, checkpoint: Path) -> None:
        torch.manual_seed(1)
        self.model = Qwen3ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)

    def step(self) -> None:
        """Learn some random tokens."""
        tokens = torch.randint(0, 256, (4, 32))
        self._optimizer.zero_grad()
        self.model(input_ids=tokens, labels=tokens).loss.backward()
        self._optimizer.step()

    def says(self, prompt: bytes) -> list[int]:
        """The most likely continuation, whatever ends a sequence."""
        tokens = list(prompt)
        for _ in range(LENGTH):
            with torch.no_grad():
                tokens.append(int(self.model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
        return tokens[len(prompt) :]


def main(url: str, publisher: str, checkpoint: Path, folder: Path) -> None:
    """Train as standard input says."""
    trainer = Trainer(checkpoint)
    with PUBLISHERS[publisher](url, folder) as weights:
        for version in map(str.strip, sys.stdin):
            trainer.step()
            state = trainer.model.state_dict()
            if version == "misshapen":
                state["model.layers.0.self_attn.k_proj.weight"] = torch.zeros(3, 5)
            try:
                weights.publish(state, version)
            except PublishFailed as failure:
                answer = {"error": str(failure), "workers": failure.workers}
            else:
                answer = {"version": version, "said": [trainer.says(prompt) for prompt in PROMPTS]}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
