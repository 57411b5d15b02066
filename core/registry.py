"""Which plugins there are, in which order their hooks run, and who is to blame when one fails.

Plugins come by entry points of the group `headrace.plugins`, ours and theirs alike. An entry point names a class. Its attribute
`settings_type` (a `PluginSettings`) makes the constructor take the plugin's own section of the settings, `[plugins.NAME]`; a class
without one takes nothing and has no section. `enabled_by_default = False` makes it wait for `[plugins] enable`.
"""

import os
import sys
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from types import CodeType
from typing import TYPE_CHECKING, Any

import pluggy
import structlog
from msgspec import Struct

from core.errors import CallError, PluginFault
from core.hookspecs import HOOKS, PROJECT, Choice, HookSpecs
from core.settings import PluginSettings, PluginsSettings, Settings, SettingsError, convert_settings, nearest

if TYPE_CHECKING:
    from core.call import Call
    from core.fleet.transport import WeightTransport
    from core.fleet.worker import Worker

log = structlog.stdlib.get_logger()

GROUP = "headrace.plugins"
#: Hooks that only tell something. Each implementation is called by itself, so that the fault of one hides nothing from another.
_NOTICES = ("call_settled", "worker_joined", "worker_left", "session_finished")


class Loaded(Struct, frozen=True):
    """One plugin: the object, its name, and the distribution that it comes from (empty for one that was passed in)."""

    name: str
    plugin: object
    distribution: str = ""
    version: str = ""


class Registry:
    """The loaded plugins and their hooks.

    A hook's implementations run in this order: the plugins that `[routing] policies` names, as it names them, then the others by
    name. pluggy's `tryfirst` and `trylast` override that.

    Raises (constructor): `SettingsError` when a plugin implements a hook that doesn't exist or asks for an argument that the hook
    doesn't have, and when a policy isn't a loaded plugin that chooses workers.
    """

    def __init__(self, plugins: Sequence[Loaded], policies: Sequence[str] = ()) -> None:
        rank = {name: i for i, name in enumerate(policies)}
        self.plugins = sorted(plugins, key=lambda p: (rank.get(p.name, len(rank)), p.name))
        manager = pluggy.PluginManager(PROJECT)
        manager.add_hookspecs(HookSpecs)
        self._names = {id(loaded.plugin): loaded.name for loaded in self.plugins}
        self._codes: set[CodeType] = set()
        for loaded in reversed(self.plugins):  # pluggy calls the latest first
            try:
                manager.register(loaded.plugin, loaded.name)
                manager.check_pending()
            except pluggy.PluginValidationError as error:
                raise SettingsError(f"plugin {loaded.name!r} of {loaded.distribution or 'this process'}: {error}") from error
            for caller in manager.get_hookcallers(loaded.plugin) or ():
                self._codes |= {impl.function.__code__ for impl in caller.get_hookimpls()}
        if os.environ.get("HEADRACE_TRACE_HOOKS"):
            manager.add_hookcall_monitoring(_print_before, _print_after)
        self._manager = manager
        choosers = self._implementations("choose_worker")
        for policy in policies:
            if policy not in choosers:
                raise SettingsError(f"routing.policies: no loaded plugin {policy!r} chooses workers: {nearest(policy, choosers)}")
        idle = [p.plugin for p in self.plugins if p.name in choosers and p.name not in policies]
        callers = {name: getattr(manager.hook, name) for name in HOOKS if self._implementations(name)}
        callers["choose_worker"] = manager.subset_hook_caller("choose_worker", idle)
        self._callers = callers
        self._preparing = [(p.name, self._alone("prepare_call", p)) for p in self._implementing("prepare_call")]
        self._beginning = [(p.name, self._alone("begin_attempt", p)) for p in self._implementing("begin_attempt")]
        self._notices = {hook: [(p.name, self._alone(hook, p)) for p in self._implementing(hook)] for hook in _NOTICES}

    def call(self, hook: str, **arguments: Any) -> Any:
        """Call a hook on the path of a call; `choose_worker` asks only the plugins that `policies` names.

        Raises: the `CallError` that an implementation raised, and `PluginFault` for anything else.
        """
        caller = self._callers.get(hook)
        if caller is None:  # nobody implements it
            return []
        try:
            return caller(**arguments)
        except CallError:
            raise
        except Exception as error:
            raise PluginFault(self.culprit(error), hook, error) from error

    def tell(self, hook: str, **arguments: Any) -> None:
        """Call a hook that only tells something. A fault is logged with the plugin's name, and the other plugins are told all the same."""
        for name, caller in self._notices[hook]:
            try:
                caller(**arguments)
            except Exception as error:
                log.exception("plugin.failed", plugin=name, hook=hook, error=type(error).__name__)

    async def prepare_call(self, call: "Call") -> None:
        """`prepare_call` of each plugin in turn.

        Cancellation: that of the plugin that is waited for.
        Raises: as `call` does.
        """
        for name, caller in self._preparing:
            try:
                for awaitable in caller(call=call):
                    await awaitable
            except CallError:
                raise
            except Exception as error:
                raise PluginFault(name, "prepare_call", error) from error

    async def begin_attempt(self, call: "Call") -> "Call":
        """`begin_attempt` of each plugin in turn; what goes to a worker then.

        Cancellation: that of the plugin that is waited for.
        Raises: as `call` does.
        """
        for name, caller in self._beginning:
            try:
                for awaitable in caller(call=call):
                    call = await awaitable or call
            except CallError:
                raise
            except Exception as error:
                raise PluginFault(name, "begin_attempt", error) from error
        return call

    async def prepare(self, worker: "Worker") -> None:
        """`prepare_worker` of each plugin in turn. Raises: `PluginFault`, whose cause is what the plugin raised."""
        for loaded in self._implementing("prepare_worker"):
            try:
                for awaitable in self._alone("prepare_worker", loaded)(worker=worker):
                    await awaitable
            except Exception as error:
                raise PluginFault(loaded.name, "prepare_worker", error) from error

    def implements(self, hook: str) -> bool:
        """Whether some plugin implements the hook."""
        return hook in self._callers

    def culprit(self, error: BaseException) -> str:
        """The name of the plugin whose hook raised this.

        The innermost one, because an error passes through the hook wrappers around it. Plugins may share a method by inheritance, so
        what counts is the object that it was called on.
        """
        name = "unknown"
        traceback = error.__traceback__
        while traceback:
            frame = traceback.tb_frame
            if frame.f_code in self._codes and frame.f_code.co_varnames:
                name = self._names.get(id(frame.f_locals.get(frame.f_code.co_varnames[0])), name)
            traceback = traceback.tb_next
        return name

    def describe(self) -> dict[str, Any]:
        """The loaded plugins with their hooks, and the implementations of each hook in call order."""
        orders = {hook: tuple(reversed(self._implementations(hook))) for hook in self._callers}
        return {
            "plugins": [
                {
                    "name": p.name,
                    "distribution": p.distribution,
                    "version": p.version,
                    "hooks": [hook for hook, order in orders.items() if p.name in order],
                }
                for p in self.plugins
            ],
            "hooks": orders,
        }

    def services(self, proxy: Any) -> list[tuple[str, Callable[[], Awaitable[None]]]]:
        """What `run_service` returns, by the plugin's name."""
        found: list[tuple[str, Callable[[], Awaitable[None]]]] = []
        for loaded in self._implementing("run_service"):
            found += [(loaded.name, service) for service in self._alone("run_service", loaded)(proxy=proxy)]
        return found

    def transports(self) -> "list[tuple[str, WeightTransport]]":
        """What `weight_transports` returns, each with the plugin's name."""
        implementations = self._manager.hook.weight_transports.get_hookimpls()
        return [(each.plugin_name, transport) for each in implementations for transport in each.function() or ()]

    def _implementing(self, hook: str) -> list[Loaded]:
        """The plugins that implement a hook, in call order."""
        names = self._implementations(hook)[::-1]
        return sorted((p for p in self.plugins if p.name in names), key=lambda p: names.index(p.name))

    def _alone(self, hook: str, loaded: Loaded) -> pluggy.HookCaller:
        """The hook as only this plugin implements it."""
        return self._manager.subset_hook_caller(hook, [other.plugin for other in self.plugins if other is not loaded])

    def _implementations(self, hook: str) -> list[str]:
        return [impl.plugin_name for impl in getattr(self._manager.hook, hook).get_hookimpls()]


def load_plugins(settings: Settings, *, only: Collection[str] | None = None) -> Registry:
    """Load the plugins that the settings ask for; of these, `only` those.

    Raises: `SettingsError`, which names the distribution when a plugin can't be imported or its settings are wrong.
    """
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=GROUP):
        if entry.name in found:
            raise SettingsError(f"plugin {entry.name!r} comes from {_origin(found[entry.name])} and from {_origin(entry)}; uninstall one")
        found[entry.name] = entry
    choice = settings.plugins
    for key, names in (("enable", choice.enable), ("disable", choice.disable), ("", list(choice.sections))):
        for name in names:
            if name not in found:
                raise SettingsError(f"plugins.{key or name}: there is no plugin {name!r}: {nearest(name, list(found))}")
    wanted = found if only is None else {name: entry for name, entry in found.items() if name in only}
    return Registry(list(_load_all(wanted, choice)), settings.routing.policies)


def _load_all(found: Mapping[str, EntryPoint], choice: PluginsSettings) -> Iterator[Loaded]:
    for name, entry in found.items():
        if name in choice.disable:
            continue
        distribution = _origin(entry)
        try:
            plugin_type: Any = entry.load()
        except Exception as error:
            raise SettingsError(f"plugin {name!r} of {distribution} can't be imported: {type(error).__name__}: {error}") from error
        if not getattr(plugin_type, "enabled_by_default", True) and name not in choice.enable:
            continue
        try:
            plugin = _make(plugin_type, name, choice.sections.get(name))
        except SettingsError:
            raise
        except Exception as error:
            raise SettingsError(f"plugin {name!r} of {distribution} can't start: {type(error).__name__}: {error}") from error
        yield Loaded(name, plugin, distribution, entry.dist.version if entry.dist else "?")


def _origin(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist else "?"


def _make(plugin_type: Callable[..., object], name: str, section: dict[str, Any] | None) -> object:
    settings_type: type[PluginSettings] | None = getattr(plugin_type, "settings_type", None)
    path = f"plugins.{name}"
    if settings_type:
        return plugin_type(convert_settings(section or {}, settings_type, source="settings", path=path))
    if section:
        raise SettingsError(f"{path}: this plugin has no settings")
    return plugin_type()


def _print_before(hook_name: str, hook_impls: object, kwargs: Mapping[str, Any]) -> None:  # noqa: ARG001 - pluggy passes three
    arguments = ", ".join(f"{name}={_brief(value)}" for name, value in kwargs.items())
    print(f"hook {hook_name}({arguments})", file=sys.stderr)  # noqa: T201 - a person asked for it


def _print_after(outcome: pluggy.Result[Any], hook_name: str, hook_impls: object, kwargs: Mapping[str, Any]) -> None:  # noqa: ARG001
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
