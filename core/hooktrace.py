"""What `HEADRACE_TRACE_HOOKS` prints of each hook call: pluggy's monitoring calls these."""

import sys
from collections.abc import Mapping
from typing import Any

import pluggy

from core.hookspecs import Choice


def print_before(hook_name: str, hook_impls: object, kwargs: Mapping[str, Any]) -> None:  # noqa: ARG001 - pluggy passes three
    """Before a hook is called."""
    arguments = ", ".join(f"{name}={_brief(value)}" for name, value in kwargs.items())
    print(f"hook {hook_name}({arguments})", file=sys.stderr)  # noqa: T201 - a person asked for it


def print_after(outcome: pluggy.Result[Any], hook_name: str, hook_impls: object, kwargs: Mapping[str, Any]) -> None:  # noqa: ARG001
    """After it was."""
    # An exception's text may quote what the call holds.
    result = type(outcome.exception).__name__ if outcome.exception else _brief(outcome.get_result())
    print(f"hook {hook_name} -> {result}", file=sys.stderr)  # noqa: T201


def _brief(value: Any) -> str:
    """A value without what must not be in a log: prompts, tokens, keys. They are numbers and strings, so none of these is shown."""
    name = type(value).__name__
    if isinstance(value, list | tuple):
        return f"[{', '.join(_brief(item) for item in value)}]"  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, Choice):
        return f"<Choice {value.worker.id}: {value.reason}>"
    if identity := getattr(value, "id", None):
        return f"<{name} {identity}>"
    return repr(value) if isinstance(value, bool | None) else f"<{name}>"
