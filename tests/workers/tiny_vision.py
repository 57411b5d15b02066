"""The tiny model that sees, without its weights: a Qwen3-VL with 16-pixel patches, four of which become one token.

An image of 32 × 32 pixels is one token, 64 × 64 are four.
"""

import json
from pathlib import Path
from typing import Any

from tests.workers import tiny_model

VOCAB_SIZE = 324
VISION_START, VISION_END, IMAGE, VIDEO = range(320, 324)
#: Numbers that one patch has: three colours, two frames, 16 × 16 pixels.
PATCH_VALUES = 3 * 2 * 16 * 16
#: Patches along one side of what becomes one token.
MERGE = 2

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "text_config": {
        "model_type": "qwen3_vl_text",
        **{
            name: tiny_model.CONFIG[name]
            for name in (
                *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
                *("hidden_act", "attention_bias", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings"),
            )
        },
        "vocab_size": VOCAB_SIZE,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [12, 10, 10], "mrope_interleaved": True},
        "bos_token_id": None,
        "eos_token_id": tiny_model.IM_END,
    },
    "vision_config": {
        "model_type": "qwen3_vl_vision",
        "in_channels": 3,
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "patch_size": 16,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "out_hidden_size": tiny_model.CONFIG["hidden_size"],
        "num_position_embeddings": 256,
        "deepstack_visual_indexes": [0],
    },
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
    "tie_word_embeddings": True,
}

_PIXELS = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": MERGE, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
_SIZE = {"size": {"shortest_edge": 32 * 32, "longest_edge": 128 * 128}}
#: Files that say how pictures become patches.
PROCESSOR: dict[str, Any] = {
    "preprocessor_config.json": {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen3VLProcessor",
        **_PIXELS,
        **_SIZE,
    },
    "video_preprocessor_config.json": {"video_processor_type": "Qwen3VLVideoProcessor", **_PIXELS, **_SIZE},
}

_TOKENS = {"<|vision_start|>": VISION_START, "<|vision_end|>": VISION_END, "<|image_pad|>": IMAGE, "<|video_pad|>": VIDEO}


def write(folder: Path) -> None:
    """Write configuration, tokenizer, and what prepares pictures, into `folder`, which is made if it is missing."""
    tiny_model.write(folder)
    for name, content in {"config.json": CONFIG, "tokenizer.json": tokenizer(), **PROCESSOR}.items():
        (folder / name).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def tokenizer() -> dict[str, Any]:
    """The content of tokenizer.json: the tiny model's, with four more special tokens."""
    content = tiny_model.tokenizer()
    content["added_tokens"] += [content["added_tokens"][0] | {"id": token_id, "content": token} for token, token_id in _TOKENS.items()]
    return content
