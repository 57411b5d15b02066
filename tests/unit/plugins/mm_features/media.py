"""Media for tests: the `kwargs` of one image as a processor packs them, and calls with them."""

import base64
from typing import Any

from msgspec import msgpack

PROMPT = list(range(10, 30))


def tensor(dtype: str, shape: list[int], content: bytes) -> list[Any]:
    """A tensor in line."""
    return [dtype, shape, msgpack.Ext(3, content)]


def kwargs(fill: int = 1, patches: int = 2) -> bytes:
    """The `kwargs` of a Qwen3-VL image whose patches have four numbers each; the bytes of the numbers are `fill`."""
    return msgpack.encode(
        {
            "pixel_values": {
                "data": tensor("float32", [patches, 4], bytes([fill]) * (patches * 16)),
                "field": ["flat", {"slices": [[0, patches, None]], "dim": 0, "keep_on_cpu": False}],
            },
            "image_grid_thw": {"data": tensor("int64", [3], bytes(24)), "field": ["batched", {"keep_on_cpu": True}]},
        }
    )


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def features(*items: tuple[str, int, int, bytes | None], modality: str = "image") -> dict[str, Any]:
    """`features` with items of (hash, offset, length, kwargs)."""
    return {
        "mm_hashes": {modality: [item[0] for item in items]},
        "mm_placeholders": {modality: [{"offset": item[1], "length": item[2]} for item in items]},
        "kwargs_data": {modality: [item[3] and encoded(item[3]) for item in items]},
    }


def one(data: bytes | None = None, *, name: str = "h") -> dict[str, Any]:
    """`features` with one image of four tokens."""
    return features((name, 2, 4, kwargs() if data is None else data))


def body(**members: Any) -> dict[str, Any]:
    return {"token_ids": PROMPT, "sampling_params": {}, **members}
