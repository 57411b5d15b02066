"""Calls of hooks without pluggy in between.

pluggy checks the arguments of each call, copies the list of implementations and looks for wrappers: some seven microseconds, for a dozen
hooks of each call and one of each token. Which plugins there are, and what they take, is known beforehand.
"""

from collections.abc import Callable
from typing import Any, Final, cast

import pluggy
import trio

HookCall = Callable[..., Any]

_ENDS: Final = (trio.Cancelled, KeyboardInterrupt, GeneratorExit)


def is_end(error: BaseException) -> bool:
    """Whether a hook that raises this only passes on that its task or headrace ends: no plugin is to blame for it.

    `SystemExit` is none: a plugin that raises it (`argparse` does, for what it can't parse) has failed, and ends nothing but its call.
    `GeneratorExit` is one, since it can't be told from that of a coroutine or generator that is closed while it waits in the hook.
    """
    if isinstance(error, BaseExceptionGroup):
        return cast("BaseExceptionGroup[BaseException]", error).subgroup(_ENDS) is not None
    return isinstance(error, _ENDS)


def direct(caller: pluggy.HookCaller) -> HookCall:
    """A function that calls the present implementations of a hook as `caller` does, with the same result.

    It is `caller` itself when an implementation wraps the others.
    """
    implementations = caller.get_hookimpls()[::-1]
    if any(each.wrapper or each.hookwrapper for each in implementations):
        return caller
    functions = [(each.function, each.argnames) for each in implementations]

    def first(**arguments: Any) -> Any:
        pick = arguments.__getitem__
        for function, names in functions:
            result = function(*map(pick, names))
            if result is not None:
                return result
        return None

    def every(**arguments: Any) -> list[Any]:
        pick = arguments.__getitem__
        results: list[Any] = []
        for function, names in functions:
            result = function(*map(pick, names))
            if result is not None:
                results.append(result)
        return results

    return first if caller.spec and caller.spec.opts.get("firstresult") else every
