"""The tiny model without its weights: a byte-level tokenizer of 320 tokens and the configuration of a 2-layer Qwen3.

All of it is plain JSON, so a worker with a scripted engine needs neither torch nor transformers. The real engine's model
(`tiny_weights.py`) uses the same files and adds random weights.

Token ids can be read by eye: 0..255 are the bytes themselves, then come 61 merges of common English, then 3 special tokens.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MAX_MODEL_LEN = 2048
VOCAB_SIZE = 320
END_OF_TEXT, IM_START, IM_END = 317, 318, 319

#: as generation_config.json lists them: the primary end of sequence first
EOS_TOKEN_IDS = (IM_END, END_OF_TEXT)

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "max_position_embeddings": MAX_MODEL_LEN,
    "bos_token_id": None,
    "eos_token_id": IM_END,
    "torch_dtype": "float32",
}

_SPECIAL_TOKENS = {"<|endoftext|>": END_OF_TEXT, "<|im_start|>": IM_START, "<|im_end|>": IM_END}

# "left+right", "_" for a space. Both halves are single bytes or the result of an earlier line.
_MERGES = """
    _+t h+e i+n e+r o+n r+e a+n a+t e+n o+r e+s i+t o+u i+s a+l a+r n+d s+t l+e e+d
    _+a _+s _+w _+c _+o _+b _+f _+p _+m _+h _+d _+n _+i _+l _+g _+r _+e v+e l+l r+o
    i+c a+s o+m u+r c+h i+on in+g _t+he _o+f _t+o _a+nd en+t _+in _i+t f+or _i+s e+l _w+as t+h th+at i+d
"""

_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write(folder: Path, *, vocab_size: int = VOCAB_SIZE, generation_config: Mapping[str, Any] | None = None) -> None:
    """Write configuration and tokenizer into `folder`, which is made if it is missing.

    A `vocab_size` above the tokenizer's gives a model with tokens that have no text, as padded vocabularies do. `generation_config` is what
    the model recommends.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in {
        "config.json": CONFIG | {"vocab_size": vocab_size},
        "generation_config.json": {"eos_token_id": list(EOS_TOKEN_IDS), "pad_token_id": END_OF_TEXT, **(generation_config or {})},
        "tokenizer.json": tokenizer(),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "model_max_length": MAX_MODEL_LEN,
            "clean_up_tokenization_spaces": False,
            "chat_template": _CHAT_TEMPLATE,
        },
    }.items():
        (folder / name).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def tokenizer() -> dict[str, Any]:
    """The content of tokenizer.json."""
    alphabet = _alphabet()
    vocab = {char: byte for byte, char in alphabet.items()}
    merges = [[half.replace("_", alphabet[0x20]) for half in merge.split("+")] for merge in _MERGES.split()]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": token_id, "content": token, "special": True, "normalized": False}
            | {"single_word": False, "lstrip": False, "rstrip": False}
            for token, token_id in _SPECIAL_TOKENS.items()
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": merges,
        },
    }


def _alphabet() -> dict[int, str]:
    """Byte-level BPE's alphabet: printable bytes stand for themselves, the others for characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
