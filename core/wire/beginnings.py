"""Where the answer of a worker's HTTP server begins, which nobody else reads: before that, the call can still go to another worker.

A paused engine refuses calls (vLLM 0.33), and it may be headrace that has paused it, a moment ago. Such a call waits at the gate, like
others. In a stream the refusal is an event, and the server has sent one without any output before it.
"""

from http import HTTPStatus
from typing import Any, Final

import msgspec
from msgspec import Struct, field

from core.errors import CallError, WorkerPaused, from_code, from_http

#: No refusal of vLLM's is longer, and no event without output.
_MOST: Final = 16 << 10
_EVENT: Final = b"data: {"


class _Choice(Struct):
    text: str = ""
    delta: dict[str, Any] = field(default_factory=dict[str, Any])
    finish_reason: str | None = None

    @property
    def is_empty(self) -> bool:
        said = [value for key, value in self.delta.items() if key != "role" and value]
        return not (self.text or said or self.finish_reason)


class _Error(Struct):
    message: str = ""
    code: int | str = 500


class _Event(Struct):
    choices: list[_Choice] = field(default_factory=list[_Choice])
    error: _Error | None = None


_events = msgspec.json.Decoder(_Event)


def has_begun(data: bytes, *, status: int, events: bool, ended: bool) -> bool:
    """Whether an answer of which these bytes have come has begun; else more has to come. `events`: they are server-sent events.

    Raises: `WorkerPaused` for an answer that says no more than that.
    """
    enough = ended or len(data) > _MOST
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        if ended:
            _go_back(from_http(status, data))
        return enough
    if not events:
        return True
    *whole, rest = data.split(b"\n\n")
    return not all(map(_is_silent, whole)) or enough or not _EVENT.startswith(rest[: len(_EVENT)])


def _is_silent(event: bytes) -> bool:
    """Whether an event is one that comes before any output."""
    try:
        said = _events.decode(event.removeprefix(b"data: "))
    except (ValueError, RecursionError):  # msgspec's are ValueErrors
        return False
    if said.error is not None:
        _go_back(from_code(said.error.code, said.error.message))
    return bool(said.choices) and all(choice.is_empty for choice in said.choices)


def _go_back(error: CallError) -> None:
    if isinstance(error, WorkerPaused):
        raise error
