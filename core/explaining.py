"""Where a call would go, and why: what `POST /fleet/route` answers. Nothing is sent, and nothing is counted."""

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from core.call import Call
from core.errors import CallError, PluginFault
from core.fleet.fleet import Fleet
from core.fleet.worker import Worker
from core.path import Path
from core.placement import Placer
from core.registry import Registry
from core.wire.needs import HTTP_CAN, fields, missing


class WorkerVerdict(Struct):
    """Whether a worker may take the call; if not, `why`."""

    id: str
    state: str
    role: str
    policy_version: str | None
    in_flight: int
    eligible: bool
    why: str


class PolicyVerdict(Struct):
    """What a policy says: a worker and a reason, or no worker and why not."""

    policy: str
    worker: str | None
    rank: int | None
    reason: str


class Chosen(Struct):
    """Where the call would go."""

    worker: str
    rank: int | None
    wire: str
    policy: str
    reason: str


class Explanation(Struct):
    """Without a `choice`, the call would wait at the gate, or end with the `error`."""

    choice: Chosen | None
    waits: bool
    error: str | None
    #: Every policy that is asked for this call, in its order; the first with a worker decides.
    policies: list[PolicyVerdict]
    workers: list[WorkerVerdict]
    #: What is done elsewhere before, or why nothing is, as plugins say (`explain_attempt`).
    legs: list[str]


class Explainer:
    """Asks whoever places calls, without placing one."""

    def __init__(self, registry: Registry, fleet: Fleet, placer: Placer, path: Path) -> None:
        self._registry = registry
        self._fleet = fleet
        self._placer = placer
        self._path = path

    async def explain(self, call: Call) -> Explanation:
        """Receive and identify the call, and say what would become of it at its first attempt.

        Cancellation: that of a plugin that prepares the call.
        Raises: the `CallError` with which the call would be refused before anybody looks for a worker.
        """
        async with self._path.received(call):
            return self._explain(call)

    def _explain(self, call: Call) -> Explanation:
        obstacles = self._placer.obstacles(call)
        self._ask_wires(call, obstacles)
        self._ask_plugins(call, obstacles)
        eligible = tuple(w for w in self._fleet.workers.values() if w not in obstacles)
        policies = self._ask_policies(call, eligible)
        decided = next((verdict for verdict in policies if verdict.worker is not None), None)
        choice = error = None
        waits = self._placer.would_wait(call, {})
        if decided and decided.worker is not None:
            worker = self._fleet.workers[decided.worker]
            wire = "http" if call.relayed or not (lane := worker.lane_for(call.needs)) else lane.wire
            choice = Chosen(worker.id, decided.rank, wire, decided.policy, decided.reason)
        if not waits and (refusal := self._refusal(call)):
            choice, error = None, refusal
        workers = [_verdict(worker, obstacles.get(worker, "")) for worker in self._fleet.workers.values()]
        return Explanation(choice, waits, error, policies, workers, self._ask_for_legs(call))

    def _refusal(self, call: Call) -> str | None:
        try:
            self._placer.place(call, {})
        except CallError as error:
            return error.message
        return None

    def _ask_wires(self, call: Call, obstacles: dict[Worker, str]) -> None:
        for worker in self._fleet.workers.values():
            if worker not in obstacles and not call.relayed and worker.lane_for(call.needs) is None:
                wanted = missing(call.needs, [lane.can for lane in worker.lanes])
                named = sorted(name for need in wanted for name in fields(need, call.needed_by))
                obstacles[worker] = f"has no wire that carries {' and '.join(named)}"
                if worker.http_closed and wanted & HTTP_CAN:
                    obstacles[worker] += f": {worker.http_closed}"

    def _ask_plugins(self, call: Call, obstacles: dict[Worker, str]) -> None:
        workers = tuple(w for w in self._fleet.workers.values() if w not in obstacles)
        if not workers:
            return
        for name, answer in self._registry.each("eligible_workers", call=call, workers=workers):
            kept, why = _kept(name, answer, workers)
            obstacles |= {worker: why for worker in workers if worker not in kept and worker not in obstacles}

    def _ask_for_legs(self, call: Call) -> list[str]:
        legs: list[str] = []
        for name, answer in self._registry.each("explain_attempt", call=call):
            if isinstance(answer, Exception):
                legs.append(f"{name} fails: {type(answer).__name__}")
            else:
                legs += [line for lines in answer for line in lines]
        return legs

    def _ask_policies(self, call: Call, workers: Sequence[Worker]) -> list[PolicyVerdict]:
        verdicts: list[PolicyVerdict] = []
        for policy in self._placer.routing.policies(call, workers) if workers else ():
            try:
                choice = self._registry.choose(policy, call, workers)
            except CallError as error:
                verdicts.append(PolicyVerdict(policy, None, None, _words(error)))
                continue
            if choice is None:
                verdicts.append(PolicyVerdict(policy, None, None, "leaves it to the next policy"))
            else:
                rank = choice.rank if call.data_parallel_rank is None else call.data_parallel_rank
                verdicts.append(PolicyVerdict(policy, choice.worker.id, rank, choice.reason))
        return verdicts


def _kept(plugin: str, answer: Any, workers: Sequence[Worker]) -> tuple[Sequence[Worker], str]:
    """Whom a plugin's answer leaves, and its words for the others."""
    if isinstance(answer, CallError):
        return (), f"is refused by {plugin}: {answer.message}"
    if isinstance(answer, Exception):
        return (), f"is not to be had, because {plugin} failed: {type(answer).__name__}"
    return answer[0] if answer else workers, f"is not for this call, says {plugin}"


def _words(error: CallError) -> str:
    return f"fails: {error.what}" if isinstance(error, PluginFault) else f"refuses the call: {error.message}"


def _verdict(worker: Worker, why: str) -> WorkerVerdict:
    return WorkerVerdict(worker.id, worker.state, worker.role, worker.policy_version, worker.in_flight, not why, why)
