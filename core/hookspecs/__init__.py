"""Every hook that a plugin can implement.

* `calls`: the life of a call, from `receive_call` to `call_settled`, in its order;
* `workers`: workers that come and go, and the weights that they get;
* `proxy`: what headrace serves and runs beside calls: routes, models, metrics, services.

A plugin is a class; its methods that carry `@hookimpl` are its hooks, and are found by their names. Arguments are passed by name, and
a plugin takes only those that it wants. Data-plane hooks are plain functions: they must not block. A spec that says "async" may be
an `async def`, which the core awaits.

What a hook may raise stands in its spec. Anything else is a fault of the plugin: that call ends with a 500 that names the plugin, and
no other call is touched. `HEADRACE_TRACE_HOOKS=1` prints each hook call, with arguments and result.
"""

from core.hookspecs.calls import CallSpecs, Choice
from core.hookspecs.markers import PROJECT, hookimpl
from core.hookspecs.proxy import ProxySpecs
from core.hookspecs.workers import WorkerSpecs

__all__ = ["CALL_HOOKS", "HOOKS", "PROJECT", "Choice", "HookSpecs", "hookimpl"]


class HookSpecs(CallSpecs, WorkerSpecs, ProxySpecs):
    """All of them. Plugins don't inherit from this class; it only holds the signatures."""


def _names(specs: type) -> tuple[str, ...]:
    return tuple(name for name in vars(specs) if not name.startswith("_"))


#: The hooks' names, those of a call first, in the order of its life.
HOOKS = _names(CallSpecs) + _names(WorkerSpecs) + _names(ProxySpecs)
#: Those in the life of a call.
CALL_HOOKS = frozenset(_names(CallSpecs))
