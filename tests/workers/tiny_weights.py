"""Random weights for the tiny model, and an adapter for it; runs inside the engine's own environment, which has torch.

`python -m tests.workers.tiny_weights FOLDER` makes `FOLDER/checkpoint-0` and `FOLDER/checkpoint-1`, two sets of weights that answer
differently, and `FOLDER/adapter`, a LoRA adapter that changes what either says. The same seeds give the same files.
"""

# pyright: reportMissingImports=false
# What is missing from this project's environment is in the engine's.

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.workers import tiny_model

CHECKPOINTS = 2
_ADAPTER_RANK = 8


def write_checkpoint(folder: Path, seed: int) -> None:
    """Write a whole model: configuration, tokenizer and weights drawn with `seed`."""
    torch.manual_seed(seed)
    # Ten times the usual spread: outputs then depend visibly on the prompt, and log-probabilities are far apart.
    config = Qwen3Config.from_dict(tiny_model.CONFIG | {"initializer_range": 0.2})
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tiny_model.write(folder)


def write_adapter(folder: Path, seed: int) -> None:
    """Write a LoRA adapter over the attention's projections."""
    generator = torch.Generator().manual_seed(seed)
    config = tiny_model.CONFIG
    hidden = config["hidden_size"]
    outputs = {
        "q_proj": config["num_attention_heads"] * config["head_dim"],
        "v_proj": config["num_key_value_heads"] * config["head_dim"],
    }
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(config["num_hidden_layers"]):
        for name, size in outputs.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(_ADAPTER_RANK, hidden, generator=generator)
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(size, _ADAPTER_RANK, generator=generator)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    adapter = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "r": _ADAPTER_RANK,
        "lora_alpha": _ADAPTER_RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(outputs),
    }
    (folder / "adapter_config.json").write_text(json.dumps(adapter, indent=1) + "\n", encoding="utf-8")


def main(folder: Path) -> None:
    """Write everything."""
    for seed in range(CHECKPOINTS):
        write_checkpoint(folder / f"checkpoint-{seed}", seed)
    write_adapter(folder / "adapter", seed=CHECKPOINTS)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
