"""Calls with one picture, prepared or as it is, for the tiny model that sees."""

import base64
from typing import Any

import httpx

from tests.workers.images import IN_PROMPT, OFFSET, TOKENS, png, prepared
from tests.workers.tiny_vision import IMAGE, VISION_END, VISION_START

#: Tokens of one block of the CPU engine's prefix cache.
BLOCK = 128
LENGTH = 6
#: The picture stands at the end of a whole block, which can be found again, and close to the output. No token comes twice in a row: that is
#: what the tiny model would repeat, whatever it sees.
_BEFORE, _AFTER = bytes(range(40, 30 + BLOCK)), bytes(range(100, 112))
PROMPT = [*_BEFORE, *IN_PROMPT, *_AFTER]
PLACE = {"offset": PROMPT.index(VISION_START) + OFFSET, "length": TOKENS}
#: The prompt before a worker has made room for the picture.
RAW_PROMPT = [*_BEFORE, VISION_START, IMAGE, VISION_END, *_AFTER]
RED_PNG, BLUE_PNG = png(255, 0, 0), png(0, 0, 255)


def post(url: str, **members: Any) -> httpx.Response:
    """Ask for `LENGTH` greedy tokens."""
    sampling = {"max_tokens": LENGTH, "temperature": 0.0, "ignore_eos": True}
    return httpx.post(f"{url}/inference/v1/generate", json={"token_ids": PROMPT, "sampling_params": sampling, **members}, timeout=60)


def tokens(reply: httpx.Response) -> list[int]:
    """The output of a call that was answered."""
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["token_ids"]


def features(seed: int, name: str | None = None, *, data: bool = True) -> dict[str, Any]:
    """The picture of this seed, prepared; without `data` only its name."""
    return {
        "mm_hashes": {"image": [name or f"picture-{seed}"]},
        "mm_placeholders": {"image": [PLACE]},
        "kwargs_data": {"image": [base64.b64encode(prepared(seed)).decode() if data else None]},
    }


def parts(picture: bytes) -> list[dict[str, Any]]:
    """`content_parts`: a PNG file as it is."""
    return [{"type": "image_url", "url": f"data:image/png;base64,{base64.b64encode(picture).decode()}"}]
