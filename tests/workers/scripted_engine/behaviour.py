"""What a test can make the scripted engine do, one request at a time: the first prompt token says it.

The ids are control characters, which no ordinary prompt starts with. Some behaviours take an argument, the second prompt token.
Any other prompt gets deterministic tokens (`tokens.py`) until `max_tokens`, a stop id or the context's end.
"""

from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING

from tests.workers.scripted_engine import tokens
from tests.workers.scripted_engine.wire import Finish, Output, RequestError, array_of

if TYPE_CHECKING:
    from tests.workers.scripted_engine.run import Run

EXPERTS, MOE_LAYERS, EXPERTS_PER_TOKEN = 8, 2, 2


class Behaviour(IntEnum):
    """The first prompt token of a request that should be treated specially."""

    #: no output, ever
    SILENT = 1
    #: refused by the engine with a typed validation error
    VALIDATION_ERROR = 2
    #: refused by the engine as retryable, as while it is paused
    PAUSED_ERROR = 3
    #: fails without a reason after `argument` tokens
    ERROR = 4
    #: the third token ends the output as an explicit stop id would
    STOP_ID = 5
    #: the third token is the end of sequence (not with `ignore_eos`)
    EOS = 6
    #: every log-probability is not a number and has rank 0
    NAN_LOGPROB = 7
    #: ends after three tokens because the output repeats itself
    REPETITION = 8
    #: reports the experts that routed each token, see `routed_experts`
    ROUTED_EXPERTS = 11
    #: reports for each token that it and its successor were allowed
    SAMPLING_MASK = 12
    #: the first two tokens come from the current weights, the rest from a version whose label has `-next` appended
    VERSION_CHANGE = 14
    #: the engine dies, and can still say so
    DEATH = 15
    #: the engine process is gone at once
    EXIT = 16
    #: one token every `argument` × 10 ms
    SLOW = 17
    #: no more output after `argument` tokens
    STALL = 18
    #: the output is the rest of the prompt, then the end of sequence
    ECHO = 19


class EngineDied(Exception):
    """The scripted engine is to die. `announced` says whether it can still tell its front end."""

    def __init__(self, *, announced: bool) -> None:
        super().__init__("the scripted engine was told to die")
        self.announced = announced


def routed_experts(first_row: int, rows: int) -> list[int]:
    """The experts of sequence positions `first_row` on, row-major over (row, layer, slot): (13 row + 5 layer + slot) mod 8."""
    return [
        (13 * row + 5 * layer + slot) % EXPERTS
        for row in range(first_row, first_row + rows)
        for layer in range(MOE_LAYERS)
        for slot in range(EXPERTS_PER_TOKEN)
    ]


def attach_routed_experts(run: "Run", output: Output) -> None:
    """Report the rows that had to be routed for the next token: the prompt's at first, then that of the token before."""
    length = len(run.request.prompt_token_ids)
    first = run.request.sampling.routed_experts_prompt_start if run.produced == 0 else length + run.produced - 1
    rows = length + run.produced - first
    shape = (rows, MOE_LAYERS, EXPERTS_PER_TOKEN)
    output.routed_experts = array_of(routed_experts(first, rows), shape, "|u1")


def _fail(output: Output, error: RequestError | None) -> None:
    output.token_ids, output.logprobs, output.prompt_logprobs = [], None, None
    output.finish, output.error = Finish.ERROR, error


def _validation_error(run: "Run", output: Output) -> None:
    _fail(output, RequestError("validation_error", "scripted validation error"))


def _paused_error(run: "Run", output: Output) -> None:
    _fail(output, RequestError("engine_paused", "Generation is paused. Please retry after it resumes.", retryable=True))


def _error(run: "Run", output: Output) -> None:
    if run.produced >= run.argument:
        _fail(output, None)


def _stop_id(run: "Run", output: Output) -> None:
    if run.produced == 2:
        output.finish, output.stop_reason = Finish.STOP, run.token_ids(1)[0]


def _eos(run: "Run", output: Output) -> None:
    if run.produced == 2:
        _end_of_sequence(run, output)


def _nan_logprob(run: "Run", output: Output) -> None:
    if output.logprobs is not None:
        output.logprobs = tokens.nan_logprobs(run.token_ids(1))


def _repetition(run: "Run", output: Output) -> None:
    if run.produced == 2:
        output.finish = Finish.REPETITION


def _sampling_mask(run: "Run", output: Output) -> None:
    token = run.token_ids(1)[0]
    output.sampling_mask = array_of([token, token + 1], [2], "<i8"), None, None


def _version_change(run: "Run", output: Output) -> None:
    run.version_suffix = "-next" if run.produced >= 2 else ""


def _die(run: "Run", output: Output) -> None:
    raise EngineDied(announced=run.behaviour is Behaviour.DEATH)


def _echo(run: "Run", output: Output) -> None:
    rest = run.request.prompt_token_ids[1:]
    if run.produced >= len(rest):
        _end_of_sequence(run, output)
    else:
        _replace_token(run, output, rest[run.produced])


def _end_of_sequence(run: "Run", output: Output) -> None:
    if (eos := run.request.sampling.eos_token_id) is not None:
        _replace_token(run, output, eos)


def _replace_token(run: "Run", output: Output, token: int) -> None:
    output.token_ids, output.logprobs = [token], run.logprobs([token], [1])


#: Edits to the plain output of one step, by behaviour. SILENT, SLOW and STALL are a matter of time, not of content.
EDITS: dict[Behaviour, Callable[["Run", Output], None]] = {
    Behaviour.VALIDATION_ERROR: _validation_error,
    Behaviour.PAUSED_ERROR: _paused_error,
    Behaviour.ERROR: _error,
    Behaviour.STOP_ID: _stop_id,
    Behaviour.EOS: _eos,
    Behaviour.NAN_LOGPROB: _nan_logprob,
    Behaviour.REPETITION: _repetition,
    Behaviour.ROUTED_EXPERTS: attach_routed_experts,
    Behaviour.SAMPLING_MASK: _sampling_mask,
    Behaviour.VERSION_CHANGE: _version_change,
    Behaviour.DEATH: _die,
    Behaviour.EXIT: _die,
    Behaviour.ECHO: _echo,
}
