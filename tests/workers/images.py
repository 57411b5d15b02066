"""Pictures for the tiny model that sees, prepared as its processor would, or as a file."""

import random
import struct
import zlib

from msgspec import msgpack

from tests.workers.tiny_vision import IMAGE, MERGE, PATCH_VALUES, VISION_END, VISION_START

#: A picture's patches along one side, and the tokens that it is.
SIDE = 4
TOKENS = (SIDE // MERGE) ** 2
#: A picture in a prompt, and where its tokens start there.
IN_PROMPT = [VISION_START, *[IMAGE] * TOKENS, VISION_END]
OFFSET = 1


def prepared(seed: int) -> bytes:
    """The `kwargs` of one picture, whose patches have one colour each."""
    draw, patches, pixels = random.Random(seed), SIDE * SIDE, PATCH_VALUES // 3
    colours = [draw.choice((-1.0, 1.0)) for _ in range(patches * 3)]
    values = b"".join(struct.pack("<f", colour) * pixels for colour in colours)
    return msgpack.encode(
        {
            "pixel_values": {
                "data": ["float32", [patches, PATCH_VALUES], msgpack.Ext(3, values)],
                "field": ["flat", {"slices": [[0, patches, None]], "dim": 0, "keep_on_cpu": False}],
            },
            "image_grid_thw": {
                "data": ["int64", [3], msgpack.Ext(3, struct.pack("<3q", 1, SIDE, SIDE))],
                "field": ["batched", {"keep_on_cpu": True}],
            },
        }
    )


def png(red: int, green: int, blue: int, *, side: int = 16 * SIDE) -> bytes:
    """A picture of one colour, as a PNG file; `side` in pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = (b"\0" + bytes((red, green, blue)) * side) * side
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
