"""The token counts of an answer that passes, for the log and the metrics, where they cost next to nothing.

They stand in a reply of any size, but only a small one is read; and in one of a stream's last events, if the client asked for it. So only
the end of what passes is kept.
"""

from typing import Final

import msgspec
from msgspec import Struct

from core import Call, Outcome

#: Bytes of an answer's end that are read; up to twice as many are kept while it passes.
KEPT: Final = 32 * 1024
_EVENT: Final = b"data: "
#: From the end: `[DONE]`, an empty line, and the usage. A few more for those who put something between.
_LAST_LINES: Final = 6


class _Details(Struct):
    cached_tokens: int | None = None


class _Usage(Struct):
    """In chat and completions; the responses route has the other two names."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None


class _Response(Struct):
    usage: _Usage | None = None


class _Answer(Struct):
    usage: _Usage | None = None
    #: In the last event of a stream of the responses route.
    response: _Response | None = None


_decoder = msgspec.json.Decoder(_Answer)


class UsageReader:
    """Keeps the end of one answer, and finds the counts in it; see `Proxy.relay`."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._kept = 0
        self._passed = 0

    def see(self, data: bytes) -> None:
        """The next bytes."""
        self._pieces.append(data)
        self._kept += len(data)
        self._passed += len(data)
        if self._kept > 2 * KEPT:
            self._pieces = [b"".join(self._pieces)[-KEPT:]]
            self._kept = KEPT

    def settle(self, call: Call, outcome: Outcome) -> None:
        """Put the counts into the outcome, if there are any."""
        end = b"".join(self._pieces)
        if call.stream:
            lines = end.rstrip().rsplit(b"\n", _LAST_LINES)[-_LAST_LINES:]
            documents = [line.removeprefix(_EVENT) for line in lines if line.startswith(_EVENT)]
        else:
            documents = [end] if self._passed <= KEPT else []
        for document in reversed(documents):
            if usage := _usage(document):
                details = usage.prompt_tokens_details or usage.input_tokens_details
                outcome.prompt_tokens = usage.prompt_tokens or usage.input_tokens
                outcome.output_tokens = usage.completion_tokens or usage.output_tokens
                outcome.cached_tokens = details.cached_tokens if details else None
                return


def _usage(document: bytes) -> _Usage | None:
    try:
        answer = _decoder.decode(document)
    except (msgspec.MsgspecError, RecursionError):
        return None
    return answer.usage or (answer.response and answer.response.usage)
