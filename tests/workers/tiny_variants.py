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

from tests.workers import tiny_model, tiny_vision

#: As in `tiny_weights`: outputs then depend visibly on what went in.
_SPREAD = {"initializer_range": 0.2}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}


def write_experts(folder: Path) -> None:
    """Write the mixture of experts."""
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**_own(tiny_model.CONFIG), **_EXPERTS, **_SPREAD)).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tiny_model.write(folder)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def write_vision(folder: Path) -> None:
    """Write the model that sees."""
    torch.manual_seed(0)
    config = {name: part | _SPREAD if isinstance(part, dict) else part for name, part in _own(tiny_vision.CONFIG).items()}
    Qwen3VLForConditionalGeneration(Qwen3VLConfig(**config)).save_pretrained(folder)
    tiny_vision.write(folder)


def _own(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration without what its class says."""
    return {name: value for name, value in config.items() if name not in ("architectures", "model_type")}


if __name__ == "__main__":
    write_experts(Path(sys.argv[1], "experts"))
    write_vision(Path(sys.argv[1], "vision"))
