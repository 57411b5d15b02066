"""Two more tiny models with random weights; runs inside the engine's own environment, which has torch.

`python -m tests.workers.tiny_variants FOLDER` makes `FOLDER/experts`, a Qwen3-MoE whose tokens choose 2 of 8 experts in each of 2 layers,
and `FOLDER/vision`, a Qwen3-VL. The same seeds give the same files.
"""

# pyright: reportMissingImports=false
# What is missing from this project's environment is in the engine's.

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from tests.workers import tiny_model
from tests.workers.tiny_vision import CONFIG, PROCESSOR, tokenizer

#: As in `tiny_weights`: outputs then depend visibly on what went in.
_SPREAD = {"initializer_range": 0.2}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}


def write_experts(folder: Path) -> None:
    """Write the mixture of experts."""
    torch.manual_seed(0)
    own = {"architectures", "model_type"}
    settings = {name: value for name, value in tiny_model.CONFIG.items() if name not in own}
    _save(Qwen3MoeForCausalLM(Qwen3MoeConfig(**settings, **_EXPERTS, **_SPREAD)), folder)


def write_vision(folder: Path) -> None:
    """Write the model that sees, with what prepares images for it."""
    torch.manual_seed(0)
    config = Qwen3VLConfig(**{name: part | _SPREAD if isinstance(part, dict) else part for name, part in CONFIG.items()})
    _save(Qwen3VLForConditionalGeneration(config), folder)
    for name, content in {"tokenizer.json": tokenizer(), **PROCESSOR}.items():
        _write(folder / name, content)


def _save(model: Any, folder: Path) -> None:
    """Save a model with the tiny model's tokenizer, and its own configuration."""
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tiny_model.write(folder)
    _write(folder / "config.json", config)


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_experts(Path(sys.argv[1], "experts"))
    write_vision(Path(sys.argv[1], "vision"))
