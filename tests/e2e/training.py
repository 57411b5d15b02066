"""A trainer of the tiny model, as a process of its own: a step, its weights published, what the model then says.

`python -m tests.e2e.training URL PUBLISHER CHECKPOINT FOLDER`, in the engine's environment, which has torch. For each line on its standard
input, a version, it takes a step and publishes; it answers with a line of JSON, `{"version", "said": [tokens of each prompt]}` or
`{"error", "workers"}`.
"""

# pyright: reportMissingImports=false
# What is missing from this project's environment is in the engine's.

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import Qwen3ForCausalLM

from plugins.publishing import Publisher, PublishFailed
from tests.e2e.prompts import LENGTH, PROMPTS


def filesystem(url: str, folder: Path) -> Publisher:
    from plugins.weights_filesystem.trainer import FilesystemPublisher

    return FilesystemPublisher(url, folder)


def broadcast(url: str, folder: Path) -> Publisher:
    from plugins.weights_nccl.trainer import BroadcastPublisher

    # More messages than one, so that weights of one layer come in several.
    return BroadcastPublisher(url, host="127.0.0.1", bucket_mib=0)


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
        for line in sys.stdin:
            trainer.step()
            try:
                weights.publish(trainer.model.state_dict(), version=line.strip())
            except PublishFailed as failure:
                print(json.dumps({"error": str(failure), "workers": failure.workers}), flush=True)
            else:
                print(json.dumps({"version": line.strip(), "said": [trainer.says(prompt) for prompt in PROMPTS]}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
