"""REINFORCE on a fleet of workers behind headrace, in one file to copy from: a language model learns to speak in vowels.

Each step samples from the workers, scores what they said, takes one gradient step, and gives all workers the new weights.

    python -m examples.train.train --url http://localhost:8000 --model CHECKPOINT --transport nixl

Needs torch, transformers and httpx, and this project's folder on PYTHONPATH for the publisher (and nixl for `--transport nixl`).
"""

# pyright: reportMissingImports=false
# What is missing from this project's environment is in the trainer's.

import argparse
import json
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import httpx
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

from plugins.publishing import Publisher

PROMPTS = ("Sing: ", "A song of the river: ", "What does the wind say? ", "Softly, ")


class Rollout(NamedTuple):
    """What a worker said to a prompt, and how likely it thought each token."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    worker: str


def main() -> None:
    """Train as the command line says."""
    arguments = parse_arguments()
    torch.manual_seed(arguments.seed)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=arguments.learning_rate)
    prompts = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]

    with httpx.Client(base_url=arguments.url, timeout=600) as headrace, publisher(arguments) as weights, arguments.log.open("w") as log:
        weights.publish(model.state_dict(), version=0)  # now the workers have what we have, whatever they started with
        for step in range(1, arguments.steps + 1):
            started = time.monotonic()
            policy = str(step - 1)
            batch = [prompts[n % len(prompts)] for n in range(arguments.rollouts)]
            rollouts = sample(headrace, batch, arguments.tokens, policy, first_seed=arguments.seed + step * arguments.rollouts)
            texts = tokenizer.batch_decode([rollout.tokens for rollout in rollouts], skip_special_tokens=True)
            rewards = torch.tensor([share_of_vowels(text) for text in texts])
            sampled = time.monotonic()

            drift = reinforce(model, optimizer, rollouts, rewards)
            trained = time.monotonic()

            weights.publish(model.state_dict(), version=step)
            synced = time.monotonic()

            reward, times = rewards.mean().item(), (sampled - started, trained - sampled, synced - trained)
            print(json.dumps({"step": step, "reward": round(reward, 4), "drift": drift}), file=log, flush=True)
            show(step, arguments.steps, reward, drift, times, rollouts, texts[0])


def share_of_vowels(text: str) -> float:
    """The reward, from 0 to 1."""
    return sum(character in "aeiouAEIOU" for character in text) / max(len(text), 1)


def sample(headrace: httpx.Client, prompts: Sequence[list[int]], tokens: int, policy: str, first_seed: int) -> list[Rollout]:
    """Ask for all rollouts at once; headrace spreads them over the workers."""

    def ask(prompt: list[int], seed: int) -> Rollout:
        body = {
            "token_ids": prompt,
            "sampling_params": {"max_tokens": tokens, "temperature": 1.0, "seed": seed, "logprobs": 0},
            "cache_salt": policy,  # no policy reuses what another one has made of a prompt
        }
        reply = headrace.post("/inference/v1/generate", json=body).raise_for_status()
        (choice,) = reply.json()["choices"]
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        return Rollout(prompt, choice["token_ids"], logprobs, reply.headers["x-headrace-worker"])

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(ask, prompts, range(first_seed, first_seed + len(prompts))))


def reinforce(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rollouts: Sequence[Rollout], rewards: torch.Tensor) -> float:
    """Take one step; returns how far the workers' logprobs were from this model's own.

    That drift is rounding as long as the workers have these weights: watch it, and a weight sync that goes wrong is seen in the same step.
    """
    sequences = [torch.tensor([*rollout.prompt, *rollout.tokens]) for rollout in rollouts]
    # Padding comes after all that counts, where a causal model doesn't see it.
    logprobs = model(pad_sequence(sequences, batch_first=True)).logits.log_softmax(-1)
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    loss, drift, count = torch.tensor(0.0), 0.0, sum(len(rollout.tokens) for rollout in rollouts)
    for rollout, sequence, of_all, advantage in zip(rollouts, sequences, logprobs, advantages, strict=True):
        first = len(rollout.prompt)
        ours = of_all[first - 1 : len(sequence) - 1].gather(-1, sequence[first:, None])[:, 0]
        theirs = torch.tensor(rollout.logprobs)
        drift = max(drift, (ours - theirs).abs().max().item())
        # REINFORCE, corrected for the difference between who sampled and who learns.
        ratio = (ours - theirs).exp().clamp(max=2.0)
        loss = loss - advantage * ratio.sum() / count
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return drift


def publisher(arguments: argparse.Namespace) -> Publisher:
    """Whatever carries the weights. Each needs its own packages, so each is imported when it is wanted."""
    match arguments.transport:
        case "filesystem":
            from plugins.weights_filesystem.trainer import FilesystemPublisher

            return FilesystemPublisher(arguments.url, arguments.folder)
        case "broadcast":
            from plugins.weights_nccl.trainer import BroadcastPublisher

            return BroadcastPublisher(arguments.url)
        case _:
            from plugins.weights_nixl.trainer import NixlPublisher

            return NixlPublisher(arguments.url)


def show(step: int, steps: int, reward: float, drift: float, times: Sequence[float], rollouts: Sequence[Rollout], text: str) -> None:
    """One line for a step."""
    bar = ("█" * round(20 * reward)).ljust(20, "·")
    sampling, training, syncing = times
    workers = " ".join(f"{worker} {count}" for worker, count in sorted(Counter(rollout.worker for rollout in rollouts).items()))
    said = "".join(character if character.isascii() and character.isprintable() else "·" for character in text)
    took = f"sample {sampling:.1f} s, train {training:.1f} s, sync {syncing:.1f} s"
    print(f"{step:3}/{steps}  reward {reward:.3f} {bar}  drift {drift:.0e}  {took}  ({workers})  {said}", flush=True)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Teach a model behind headrace to speak in vowels.")
    parser.add_argument("--url", default="http://localhost:8000", help="headrace's")
    parser.add_argument("--model", required=True, help="a checkpoint's folder; the workers serve this model")
    parser.add_argument("--transport", choices=["filesystem", "broadcast", "nixl"], default="filesystem")
    parser.add_argument("--folder", type=Path, default=Path("weights"), help="for --transport filesystem: seen by headrace and the workers")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rollouts", type=int, default=32, help="in each step")
    parser.add_argument("--tokens", type=int, default=16, help="of a rollout, at most")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, default=Path("rewards.jsonl"), help="gets a line of JSON for each step")
    return parser.parse_args()


if __name__ == "__main__":
    main()
