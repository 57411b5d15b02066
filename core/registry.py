"""Which plugins there are, in which order their hooks run, and who is to blame when one fails.

A policy's `passes` says in words which calls it leaves to the next policy (`calls without a session`): who names it last is warned.
"""

import os
from collections.abc import Awaitable, Callable, Collection, Generator, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType
from typing import TYPE_CHECKING, Any, Final, cast

import pluggy
import structlog
from msgspec import Struct
from msgspec.structs import replace

from core.errors import CallError, PluginFault, shorten
from core.hookcalls import HookCall, direct, is_end
from core.hookspecs import CALL_HOOKS, HOOKS, PROJECT, Choice, HookSpecs
from core.hooktrace import print_after, print_before
from core.settings import RoutingSettings, SettingsError
from core.wording import nearest

if TYPE_CHECKING:
    from core.call import Call
    from core.fleet.transport import WeightTransport
    from core.fleet.worker import Worker
    from core.proxy import Proxy
    from core.routes import Routes

log = structlog.stdlib.get_logger()

#: Characters of a policy's reason, which goes into a header of each reply.
_LONGEST_REASON: Final = 500
#: Hooks that only tell something. Each implementation is called by itself, so that the fault of one hides nothing from another.
_NOTICES = ("attempt_started", "attempt_ended", "call_settled", "worker_joined", "worker_left", "session_finished")


class Loaded(Struct, frozen=True):
    """One plugin: the object, its name, and the distribution that it comes from (empty for one that was passed in)."""

    name: str
    plugin: object
    distribution: str = ""
    version: str = ""


class Registry:
    """The loaded plugins and their hooks.

    A hook's implementations run in this order: the plugins that `policies` names (`[routing] policies`), as it names them, then the
    others by name. pluggy's `tryfirst` and `trylast` override that. A plugin that chooses workers is a policy: it takes part in calls only
    while it is enforced, which those that `policies` names are at first.

    Raises (constructor): `SettingsError` when a plugin implements a hook that doesn't exist or asks for an argument that the hook
    doesn't have, and when a policy isn't a loaded plugin that chooses workers.
    """

    def __init__(self, plugins: Sequence[Loaded], policies: Sequence[str] = ()) -> None:
        rank = {name: i for i, name in enumerate(policies)}
        self.plugins = sorted(plugins, key=lambda p: (rank.get(p.name, len(rank)), p.name))
        self._names = {id(loaded.plugin): loaded.name for loaded in self.plugins}
        self._codes: set[CodeType] = set()
        # One manager knows all; besides, each plugin has one of its own: pluggy's callers of a subset look for it anew at each call.
        self._traced = bool(os.environ.get("HEADRACE_TRACE_HOOKS"))
        self._manager = self._managing(self.plugins)
        self._own = {loaded.name: self._managing([loaded]) for loaded in self.plugins}
        for loaded in self.plugins:
            for caller in self._manager.get_hookcallers(loaded.plugin) or ():
                self._codes |= {impl.function.__code__ for impl in caller.get_hookimpls()}
        #: The plugins that choose workers, by name.
        self.policies = frozenset(self._implementations("choose_worker"))
        #: What some of them say they leave to the next policy, as `passes` of their class.
        self.passes: dict[str, str] = {p.name: getattr(p.plugin, "passes", "") for p in self.plugins if p.name in self.policies}
        self._choosing = {p.name: self._alone("choose_worker", p) for p in self._implementing("choose_worker")}
        self._active: frozenset[str] = frozenset()
        self._callers: dict[str, HookCall] = {}
        self._preparing: list[tuple[str, HookCall]] = []
        self._beginning: list[tuple[str, HookCall]] = []
        self._notices: dict[str, list[tuple[str, HookCall]]] = {}
        self.check(RoutingSettings(policies=list(policies)))
        self.enforce(policies)

    def check(self, routing: RoutingSettings) -> None:
        """Look whether every policy that is named is a loaded plugin that chooses workers. Raises: `SettingsError`."""
        named = [("routing.policies", routing.policies)]
        named += [(f"routing.rules[{i}].policies", rule.policies) for i, rule in enumerate(routing.rules)]
        for key, policies in named:
            for i, policy in enumerate(policies):
                if policy in policies[:i]:
                    raise SettingsError(f"{key}: {policy!r} is named twice")
                if policy not in self.policies:
                    raise SettingsError(f"{key}: no loaded plugin {policy!r} chooses workers: {nearest(policy, sorted(self.policies))}")

    def enforce(self, policies: Collection[str]) -> None:
        """Let these policies take part in calls, and no other ones: of those no hook on a call's path runs."""
        active = [loaded for loaded in self.plugins if loaded.name not in self.policies or loaded.name in policies]
        path = self._managing(active)
        managers = {hook: path if hook in CALL_HOOKS else self._manager for hook in HOOKS}
        self._callers = {hook: self._caller(manager, hook) for hook, manager in managers.items() if _implementations(manager, hook)}
        self._active = names = frozenset(loaded.name for loaded in active)
        self._preparing = [(p.name, self._alone("prepare_call", p)) for p in self._implementing("prepare_call") if p.name in names]
        self._beginning = [(p.name, self._alone("begin_attempt", p)) for p in self._implementing("begin_attempt") if p.name in names]
        self._notices = {
            hook: [(p.name, self._alone(hook, p)) for p in self._implementing(hook) if p.name in names or hook not in CALL_HOOKS]
            for hook in _NOTICES
        }

    def choose(self, policy: str, call: "Call", workers: "Sequence[Worker]") -> Choice | None:
        """Ask one policy. Raises: the `CallError` that it raised, and `PluginFault`, also for a choice that is none."""
        try:
            choice = self._choosing[policy](call=call, workers=workers)
        except CallError:
            raise
        except BaseException as error:
            if is_end(error):
                raise
            raise PluginFault(policy, "choose_worker", error) from error
        if choice is None:
            return None
        if problem := _problem(choice, call, workers):
            raise PluginFault(policy, "choose_worker", ValueError(problem), problem)
        return choice if len(choice.reason) <= _LONGEST_REASON else replace(choice, reason=shorten(choice.reason, _LONGEST_REASON))

    def each(self, hook: str, **arguments: Any) -> "Iterator[tuple[str, Any]]":
        """What each plugin answers to a hook on a call's path, or the exception that it raises; for explanations."""
        for loaded in self._implementing(hook):
            if loaded.name in self._active:
                try:
                    yield loaded.name, self._alone(hook, loaded)(**arguments)
                except BaseException as error:
                    if is_end(error):
                        raise
                    yield loaded.name, error

    def call(self, hook: str, **arguments: Any) -> Any:
        """Call a hook.

        Raises: the `CallError` that an implementation raised, and `PluginFault` for anything else.
        """
        caller = self._callers.get(hook)
        if caller is None:  # nobody implements it
            return []
        try:
            return caller(**arguments)
        except CallError:
            raise
        except BaseException as error:
            if is_end(error):
                raise
            raise PluginFault(self.culprit(error), hook, error) from error

    def tell(self, hook: str, *, only: Collection[str] | None = None, **arguments: Any) -> None:
        """Call a hook that only tells something, of all plugins or `only` some. A fault is logged with the plugin's name, and the other
        plugins are told all the same.
        """
        for name, caller in self._notices[hook]:
            if only is not None and name not in only:
                continue
            try:
                caller(**arguments)
            except BaseException as error:
                if is_end(error):
                    raise
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
            except BaseException as error:
                if is_end(error):
                    raise
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
            except BaseException as error:
                if is_end(error):
                    raise
                raise PluginFault(name, "begin_attempt", error) from error
        return call

    async def prepare(self, worker: "Worker") -> None:
        """`prepare_worker` of each plugin in turn. Raises: `PluginFault`, whose cause is what the plugin raised."""
        for loaded in self._implementing("prepare_worker"):
            with _blaming(loaded.name, "prepare_worker"):
                for awaitable in self._alone("prepare_worker", loaded)(worker=worker):
                    await awaitable

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
        """The loaded plugins with their hooks, and the implementations of each hook in call order: of a call's, those that take part."""
        orders = {hook: tuple(reversed(names)) for hook in HOOKS if (names := self._implementations(hook))}
        called = {hook: tuple(n for n in names if n in self._active or hook not in CALL_HOOKS) for hook, names in orders.items()}
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
            "hooks": {hook: names for hook, names in called.items() if names},
        }

    def register_routes(self, routes: "Routes", proxy: "Proxy") -> None:
        """`register_routes` of each plugin, whose routes they then are. Raises: `PluginFault`."""
        for loaded in self._implementing("register_routes"):
            with _blaming(loaded.name, "register_routes"), routes.owned_by(loaded.name):
                self._alone("register_routes", loaded)(routes=routes, proxy=proxy)

    def services(self, proxy: "Proxy") -> list[tuple[str, Callable[[], Awaitable[None]]]]:
        """What `run_service` returns, by the plugin's name. Raises: `PluginFault`."""
        found: list[tuple[str, Callable[[], Awaitable[None]]]] = []
        for loaded in self._implementing("run_service"):
            with _blaming(loaded.name, "run_service"):
                found += [(loaded.name, service) for service in self._alone("run_service", loaded)(proxy=proxy)]
        return found

    def transports(self) -> "list[tuple[str, WeightTransport]]":
        """What `weight_transports` returns, each with the plugin's name. Raises: `PluginFault`."""
        found: list[tuple[str, WeightTransport]] = []
        for loaded in self._implementing("weight_transports"):
            with _blaming(loaded.name, "weight_transports"):
                found += [(loaded.name, transport) for some in self._alone("weight_transports", loaded)() for transport in some]
        return found

    def _implementing(self, hook: str) -> list[Loaded]:
        """The plugins that implement a hook, in call order."""
        names = self._implementations(hook)[::-1]
        return sorted((p for p in self.plugins if p.name in names), key=lambda p: names.index(p.name))

    def _alone(self, hook: str, loaded: Loaded) -> HookCall:
        """The hook as only this plugin implements it."""
        return self._caller(self._own[loaded.name], hook)

    def _caller(self, manager: pluggy.PluginManager, hook: str) -> HookCall:
        caller: pluggy.HookCaller = getattr(manager.hook, hook)
        return caller if self._traced else direct(caller)

    def _implementations(self, hook: str) -> list[str]:
        return _implementations(self._manager, hook)

    def _managing(self, plugins: Sequence[Loaded]) -> pluggy.PluginManager:
        """A manager of these plugins, in their order."""
        manager = pluggy.PluginManager(PROJECT)
        manager.add_hookspecs(HookSpecs)
        for loaded in reversed(plugins):  # pluggy calls the latest first
            try:
                manager.register(loaded.plugin, loaded.name)
                manager.check_pending()
            except pluggy.PluginValidationError as error:
                raise SettingsError(f"plugin {loaded.name!r} of {loaded.distribution or 'this process'}: {error}") from error
        if self._traced:
            manager.add_hookcall_monitoring(print_before, print_after)
        return manager


@contextmanager
def _blaming(plugin: str, hook: str) -> Generator[None, None, None]:
    """Whatever a hook beside a call's path raises is the plugin's fault. Raises: `PluginFault`."""
    try:
        yield
    except BaseException as error:
        if is_end(error):
            raise
        raise PluginFault(plugin, hook, error) from error


def _implementations(manager: pluggy.PluginManager, hook: str) -> list[str]:
    return [impl.plugin_name for impl in getattr(manager.hook, hook).get_hookimpls()]


def _problem(choice: Any, call: "Call", workers: "Sequence[Worker]") -> str:
    """What is wrong with a policy's answer; empty when nothing is."""
    if not isinstance(choice, Choice):
        return f"it returned {type(choice).__name__} instead of a Choice or None"
    worker, rank, reason = choice.worker, choice.rank, cast("Any", choice.reason)
    if worker not in workers:
        return (
            f"it chose {shorten(str(getattr(worker, 'id', type(worker).__name__)), 100)}, which is not one of the workers that it was given"
        )
    if not isinstance(reason, str):
        return f"the reason of its choice is {type(reason).__name__} instead of a text"
    ranks = worker.info.ranks if worker.info else ()
    if rank is not None and rank != call.data_parallel_rank and rank not in ranks:
        return f"it chose rank {rank} of {worker.id}, which has {', '.join(map(str, ranks)) or 'none'}"
    return ""
