"""Why a call or an administration request is refused, in words that both wires can translate."""

from enum import Enum, auto


class Problem(Enum):
    """The kinds of refusal; each wire has a status for each."""

    INVALID = auto()
    NOT_FOUND = auto()
    ALREADY_EXISTS = auto()
    PRECONDITION = auto()
    UNAVAILABLE = auto()
    INTERNAL = auto()


class Refused(Exception):
    """Something asked of the worker is refused, or failed.

    `param` names the field at fault where vLLM's HTTP server names one.
    """

    def __init__(self, problem: Problem, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.problem = problem
        self.message = message
        self.param = param


def invalid(message: str, *, param: str | None = None) -> Refused:
    """The refusal of a wrong value."""
    return Refused(Problem.INVALID, message, param=param)


class EngineDead(Refused):
    """The engine crashed. Nothing brings it back; the process has to be replaced."""

    def __init__(self) -> None:
        super().__init__(Problem.INTERNAL, "engine-core error: engine core reported fatal failure")


class Paused(Refused):
    """A new call came while the engine was paused by `abort` or `wait`. vLLM marks it as worth another try."""

    def __init__(self) -> None:
        super().__init__(Problem.UNAVAILABLE, "Generation is paused. Please retry after it resumes.")
