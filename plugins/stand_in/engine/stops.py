"""Find stop strings in text that arrives in pieces."""

from collections.abc import Sequence


class StopStrings:
    """Passes text on, as far as it can't be the start of a stop string any more.

    With `include` nothing is held back, and the stop string is part of the text that is passed on.
    """

    def __init__(self, strings: Sequence[str], *, include: bool) -> None:
        self._strings = strings
        self._include = include
        self._hold = 0 if include or not strings else max(map(len, strings)) - 1
        self._text = ""
        self._passed = 0
        self._searched = 0

    def push(self, piece: str, *, search: bool = True) -> tuple[str, str | None]:
        """Add a piece; return what may be passed on, and the stop string that the piece completed, if it did.

        `search=False` lets stop strings in the piece go by (vLLM: before `min_tokens`).
        """
        self._text += piece
        if not search:
            self._searched = len(self._text)
        elif found := self._find():
            start, string = found
            return self._pass_on(start + len(string) * self._include), string
        return self._pass_on(len(self._text) - self._hold), None

    def rest(self) -> str:
        """What was held back, for a call that ended otherwise."""
        return self._pass_on(len(self._text))

    def _find(self) -> tuple[int, str] | None:
        hits: list[tuple[int, str]] = []
        for string in self._strings:
            # A string can begin in what was searched before, as long as it ends in what is new.
            place = self._text.find(string, max(0, self._searched - len(string) + 1))
            if place >= 0:
                hits.append((place, string))
        self._searched = len(self._text)
        # The one that is complete first, so that it doesn't matter how the text was cut into pieces.
        return min(hits, key=lambda hit: (hit[0] + len(hit[1]), hit[0])) if hits else None

    def _pass_on(self, end: int) -> str:
        piece = self._text[self._passed : max(end, self._passed)]
        self._passed += len(piece)
        return piece
