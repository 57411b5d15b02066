"""A trainer of the tiny model that sees, as a process of its own: it samples for pictures, takes a step, and publishes its weights.

`python -m tests.e2e.training_seeing URL CHECKPOINT FOLDER STEPS`, in the engine's environment, which has torch. After each step, and before
the first, it prints a line of JSON: `{"version", "trainer", "fleet", "drift"}`. `trainer` has the most likely tokens for each picture,
`fleet` the same as they come through headrace, and `drift` is how far the logprobs of sampled tokens were from the trainer's own.
"""

# pyright: reportMissingImports=false
# What is missing from this project's environment is in the engine's.

import base64
import json
import sys
from pathlib import Path
from typing import Any

import httpx
import torch
from msgspec import msgpack
from torch import Tensor
from transformers import Qwen3VLForConditionalGeneration

from plugins.weights_filesystem.trainer import FilesystemPublisher
from tests.workers.images import IN_PROMPT, SIDE, TOKENS, prepared
from tests.workers.tiny_vision import IMAGE, PATCH_VALUES, VISION_START

PICTURES = (1, 2)
SAMPLES, LENGTH = 8, 6
PROMPT = [*range(40, 60), *IN_PROMPT, *range(100, 112)]
FEATURES = {"mm_placeholders": {"image": [{"offset": PROMPT.index(IMAGE), "length": TOKENS}]}}


class Trainer:
    """The model, and what a picture is to it."""

    def __init__(self, checkpoint: Path) -> None:
        self.model = Qwen3VLForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32)
        self._optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)

    def logits(self, picture: int, outputs: Tensor) -> Tensor:
        """Of each output's tokens, given the prompt with the picture: outputs × tokens × vocabulary."""
        prompts = torch.tensor([PROMPT] * len(outputs))
        values = msgpack.decode(prepared(picture), ext_hook=lambda _, data: data)["pixel_values"]["data"][2]
        pixels = torch.frombuffer(bytearray(values), dtype=torch.float32).view(SIDE * SIDE, PATCH_VALUES)
        tokens = torch.cat([prompts, outputs], dim=1)
        seen = self.model(
            input_ids=tokens,
            pixel_values=pixels.repeat(len(outputs), 1),
            image_grid_thw=torch.tensor([[1, SIDE, SIDE]] * len(outputs)),
            mm_token_type_ids=(tokens == IMAGE).int(),
        )
        return seen.logits[:, len(PROMPT) - 1 : -1]

    def says(self, picture: int) -> list[int]:
        """The most likely continuation."""
        said: list[int] = []
        with torch.no_grad():
            for _ in range(LENGTH):
                said.append(int(self.logits(picture, torch.tensor([[*said, 0]]))[0, -1].argmax()))
        return said

    def step(self, sampled: dict[int, list[tuple[list[int], list[float]]]]) -> float:
        """One of REINFORCE, for small token ids; returns the drift."""
        loss, drift = torch.tensor(0.0), 0.0
        for picture, rollouts in sampled.items():
            # A token that stands for a picture would want one.
            rollouts = [rollout for rollout in rollouts if max(rollout[0]) < VISION_START]
            outputs = torch.tensor([tokens for tokens, _ in rollouts])
            rewards = (outputs < 100).float().mean(dim=1)
            logprobs = self.logits(picture, outputs).log_softmax(-1).gather(-1, outputs[..., None])[..., 0]
            drift = max(drift, (logprobs - torch.tensor([logprobs for _, logprobs in rollouts])).abs().max().item())
            loss = loss - ((rewards - rewards.mean())[:, None] * logprobs).mean()
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return drift


class Fleet:
    """The workers behind headrace."""

    def __init__(self, url: str) -> None:
        self._headrace = httpx.Client(base_url=url, timeout=120)

    def sample(self, picture: int, version: str, **sampling: Any) -> tuple[list[int], list[float]]:
        """Tokens and their logprobs."""
        features = {
            "mm_hashes": {"image": [f"picture-{picture}"]},
            "kwargs_data": {"image": [base64.b64encode(prepared(picture)).decode()]},
        }
        body = {
            "token_ids": PROMPT,
            "features": FEATURES | features,
            "sampling_params": {"max_tokens": LENGTH, "ignore_eos": True, "logprobs": 0, **sampling},
            "cache_salt": version,
        }
        (choice,) = self._headrace.post("/inference/v1/generate", json=body).raise_for_status().json()["choices"]
        return choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]]


def main(url: str, checkpoint: Path, folder: Path, steps: int) -> None:
    """Train."""
    trainer, fleet = Trainer(checkpoint), Fleet(url)
    with FilesystemPublisher(url, folder) as weights:
        drift = 0.0
        for step in range(steps + 1):
            version = str(step)
            if step:
                seeds = range(step * 1000, step * 1000 + SAMPLES)
                sampled = {
                    picture: [fleet.sample(picture, str(step - 1), temperature=1.0, seed=seed) for seed in seeds] for picture in PICTURES
                }
                drift = trainer.step(sampled)
            weights.publish(trainer.model.state_dict(), version)
            said = {
                "trainer": [trainer.says(picture) for picture in PICTURES],
                "fleet": [fleet.sample(picture, version, temperature=0.0)[0] for picture in PICTURES],
            }
            print(json.dumps({"version": version, "drift": drift, **said}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
