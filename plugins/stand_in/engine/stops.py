"""Find stop strings in text that arrives token by token."""

from collections.abc import Sequence


class StopStrings:
    """Passes text on, as far as it can't be the start of a stop string any more.

    As in vllm-rs 0.33.0, it is counted in bytes of UTF-8 how much is held back (one less than the longest string has), and of several
    strings that one token completes the first in the list counts. With `include` nothing is held back, and the stop string is part of
    the text that is passed on.
    """

    def __init__(self, strings: Sequence[str], *, include: bool) -> None:
        self._strings = [string.encode() for string in strings]
        self._include = include
        self._hold = 0 if include or not strings else max(map(len, self._strings)) - 1
        self._text = b""
        self._passed = 0
        self._searched = 0

    def push(self, piece: str, *, search: bool = True) -> tuple[str, str | None]:
        """Add the text of a token; return what may be passed on, and the stop string that it completed, if it did.

        `search=False` lets stop strings that the token completes go by (vLLM: up to `min_tokens`).
        """
        self._text += piece.encode()
        found = self._find() if search else None
        self._searched = len(self._text)
        if found is None:
            return self._pass_on(len(self._text) - self._hold), None
        start, string = found
        return self._pass_on(start + len(string) * self._include), string.decode()

    def rest(self) -> str:
        """What was held back, for a call that ended otherwise."""
        return self._pass_on(len(self._text))

    def _find(self) -> tuple[int, bytes] | None:
        for string in self._strings:
            # A string can begin in what was searched before, as long as it ends in what is new.
            start = self._text.find(string, max(0, self._searched - len(string) + 1))
            if start >= 0:
                return start, string
        return None

    def _pass_on(self, end: int) -> str:
        end = max(end, self._passed)
        while end < len(self._text) and self._text[end] & 0xC0 == 0x80:  # in the middle of a character
            end -= 1
        piece = self._text[self._passed : end].decode()
        self._passed = end
        return piece
