"""A trace: the calls of a training run, by what matters to a policy. One JSON object per line."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

_Count = Annotated[int, Meta(ge=0, le=10_000_000)]
_Seconds = Annotated[float, Meta(ge=0)]

#: Tokens in a block, unless the simulated fleet is told otherwise.
BLOCK_SIZE: Final = 16


class TraceError(Exception):
    """The trace can't be replayed; the text names the line, what was wrong and what is allowed."""


class Turn(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One call: a line of the trace.

    Calls of one session follow one another: each starts `after` seconds after the one before it has ended. The first has `at` instead.
    """

    session: str
    #: Seconds from the start of the trace; only a session's first turn has it.
    at: _Seconds | None = None
    #: Seconds from the end of the session's turn before this one: a tool runs, say.
    after: _Seconds = 0.0
    #: A hash for each full block of the prompt, the same hash for the same tokens behind the same prefix.
    blocks: list[int] = []
    #: The blocks that the output fills; the session's next turn has them in its prompt.
    output_blocks: list[int] = []
    prompt_tokens: _Count
    output_tokens: Annotated[int, Meta(ge=1, le=10_000_000)]
    #: Calls with different salts share no blocks.
    salt: str = ""


def read_trace(path: str | Path) -> list[Turn]:
    """The turns of a file. Raises: `TraceError`; `OSError`."""
    decoder = msgspec.json.Decoder(Turn)
    turns: list[Turn] = []
    seen: set[str] = set()
    with Path(path).open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                turn = decoder.decode(line)
            except msgspec.MsgspecError as error:
                raise TraceError(f"{path}:{number}: {error}") from error
            if (turn.at is None) is (turn.session not in seen):
                wrong = "the first turn of a session needs at" if turn.at is None else "only the first turn of a session has at"
                raise TraceError(f"{path}:{number}: session {turn.session!r}: {wrong}, and the others have after")
            seen.add(turn.session)
            turns.append(turn)
    if not turns:
        raise TraceError(f"{path}: there is no turn in it")
    return turns


def write_trace(path: str | Path, turns: Iterable[Turn]) -> None:
    """Write a file that `read_trace` reads. Raises: `OSError`."""
    with Path(path).open("wb") as file:
        file.writelines(msgspec.json.encode(turn) + b"\n" for turn in turns)


def sessions(turns: Iterable[Turn]) -> Iterator[list[Turn]]:
    """The turns by session, each in its order."""
    found: dict[str, list[Turn]] = {}
    for turn in turns:
        found.setdefault(turn.session, []).append(turn)
    return iter(found.values())
