"""Base64, decoded piece by piece: the interpreter's lock is held for a piece at a time, so that a thread which decodes megabytes lets the
event loop go on in between.
"""

import binascii
from typing import Final

#: Characters; a multiple of four. Some two milliseconds.
_PIECE: Final = 1 << 20


def decode_base64(text: str | memoryview) -> bytes:
    """Raises: `ValueError` for what is no base64, with its padding."""
    pieces: list[bytes] = []
    for start in range(0, len(text), _PIECE):
        piece = binascii.a2b_base64(text[start : start + _PIECE], strict_mode=True)
        if start + _PIECE < len(text) and len(piece) != _PIECE // 4 * 3:
            raise ValueError("Excess data after padding")
        pieces.append(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
