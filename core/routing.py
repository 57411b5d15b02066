"""Which policies place a call, and who is told of the attempts that follow. Both may change while calls are in flight."""

from collections.abc import Callable, Sequence
from types import TracebackType

import structlog
from msgspec.structs import replace

from core.call import Call, Outcome
from core.errors import NoWorker
from core.fleet.worker import Worker
from core.hookspecs import Choice
from core.registry import Registry
from core.settings import Role, RoutingSettings

log = structlog.stdlib.get_logger()


class Routing:
    """The policies in force. Raises (constructor): `SettingsError` when one of them is no loaded policy."""

    def __init__(self, registry: Registry, settings: RoutingSettings) -> None:
        registry.check(settings)
        self._registry = registry
        self._attempts: set[Attempt] = set()
        #: Told when other rules are in force.
        self.changed: Callable[[], None] = _nothing
        self._enforce(settings)

    @property
    def available(self) -> frozenset[str]:
        """Every policy that may be named."""
        return self._registry.policies

    def change(self, settings: RoutingSettings) -> None:
        """Place calls by other rules from now on; attempts that are under way stay where they are.

        Policies that come into force are told of these attempts as if they were new, and those that cease to be, as if they had ended:
        what each counts is always what there is.

        Raises: `SettingsError`; then nothing has changed.
        """
        self._registry.check(settings)
        before = self._in_force
        for attempt in self._attempts:
            attempt.tell_end(only=before - settings.named)
        self._enforce(settings)
        for attempt in self._attempts:
            attempt.tell_start(only=self._in_force - before)
        self.changed()

    def policies(self, call: Call, workers: Sequence[Worker]) -> Sequence[str]:
        """Those that are asked for a call, in their order; `workers` are those that may take it, at least one."""
        for rule in self.settings.rules:
            if (not rule.model or rule.model in workers[0].models) and (rule.role is None or rule.role == _role(call, workers)):
                return rule.policies
        return self.settings.policies

    def choose(self, call: Call, workers: Sequence[Worker]) -> Choice:
        """Choose one of these workers. A rank that the client has asked for is the choice's. Raises: `CallError`."""
        for policy in self.policies(call, workers):
            choice = self._registry.choose(policy, call, workers)
            if choice is not None:
                rank = call.data_parallel_rank
                return choice if rank is None or rank == choice.rank else replace(choice, rank=rank)
        raise NoWorker(f"no routing policy chose a worker: {self._asked(self.policies(call, workers))}; name another one after them")

    def attempt(self, call: Call, choice: Choice, outcome: Outcome) -> "Attempt":
        """The scope of a call's attempt on the worker of its choice."""
        return Attempt(self._registry, self._attempts, call, choice, outcome)

    def _enforce(self, settings: RoutingSettings) -> None:
        self.settings = settings
        self._in_force = settings.named
        self._registry.enforce(self._in_force)
        for policies in (settings.policies, *(rule.policies for rule in settings.rules)):
            if passes := self._registry.passes[policies[-1]]:
                log.warning(
                    "routing.leaves_calls", policies=policies, reason=f"{policies[-1]} leaves {passes} to a next policy: they get 503"
                )

    def _asked(self, policies: Sequence[str]) -> str:
        """Who was asked, and left the call to the next one."""
        return ", ".join(f"{policy} leaves {self._registry.passes[policy] or 'it'} to the next policy" for policy in policies)


class Attempt:
    """A context manager: plugins are told when it is entered and left."""

    __slots__ = ("_attempts", "_call", "_choice", "_outcome", "_registry")

    def __init__(self, registry: Registry, attempts: "set[Attempt]", call: Call, choice: Choice, outcome: Outcome) -> None:
        self._registry = registry
        self._attempts = attempts
        self._call = call
        self._choice = choice
        self._outcome = outcome

    def __enter__(self) -> None:
        self._attempts.add(self)
        self.tell_start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._attempts.discard(self)
        self.tell_end()

    def tell_start(self, *, only: frozenset[str] | None = None) -> None:
        """Tell all plugins, or some, that it has started."""
        self._registry.tell("attempt_started", only=only, call=self._call, choice=self._choice)

    def tell_end(self, *, only: frozenset[str] | None = None) -> None:
        """Tell all plugins, or some, that it has ended."""
        self._registry.tell("attempt_ended", only=only, call=self._call, choice=self._choice, output_tokens=self._outcome.output_tokens)


def _nothing() -> None:
    """Nobody wants to know."""


def _role(call: Call, workers: Sequence[Worker]) -> Role:
    """Of the workers of a call; where some answer whole calls only, and others decode too, they count as aggregated."""
    return call.role or ("decode" if all(worker.role == "decode" for worker in workers) else "aggregated")


def ranks_for(call: Call, worker: Worker) -> Sequence[int | None]:
    """The data-parallel ranks of a worker that a policy may choose from: all of them, or the one that the client asks for.

    `(None,)` where there is no choice: the worker has one rank, or doesn't tell.
    """
    if call.data_parallel_rank is not None:
        return (call.data_parallel_rank,)
    ranks = worker.info.ranks if worker.info else ()
    return ranks if len(ranks) > 1 else (None,)
