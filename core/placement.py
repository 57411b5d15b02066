"""Where a call goes: the workers that may take it, the one that a policy chooses, and the lane."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext

from msgspec import Struct

from core.call import Call
from core.candidates import PARTIAL, Candidates, CandidatesByKind, has_rank, serves, serves_model
from core.errors import BadRequest, CallError, NotFound, NoWorker
from core.fleet.fleet import Fleet
from core.fleet.worker import Worker
from core.hookspecs import Choice
from core.lag import behind
from core.registry import Registry
from core.routing import Routing
from core.wire.lane import Lane
from core.wire.needs import HTTP_CAN, missing, refusal

#: States that end by themselves, or by a trainer's next call: whoever waits will be served.
_HELD = frozenset({"paused", "updating"})


class Placement(Struct, frozen=True):
    """A worker for one attempt, why this one, and the lane there."""

    choice: Choice
    lane: Lane

    @property
    def worker(self) -> Worker:
        """The worker."""
        return self.choice.worker

    @property
    def reason(self) -> str:
        """Why this worker, in a few words."""
        return self.choice.reason


class Placer:
    """Places calls on the fleet's workers."""

    def __init__(self, registry: Registry, fleet: Fleet, routing: Routing) -> None:
        self._registry = registry
        self._fleet = fleet
        self._candidates = CandidatesByKind(fleet)
        self.routing = routing
        self.aborts = fleet.aborts
        routing.changed = fleet.gate.notify  # who may take a call depends on what they allow

    def paused(self, worker: Worker) -> None:
        """A call was refused because the worker's engine is paused, before a probe has seen that."""
        self._fleet.paused(worker)

    async def gate(self, call: Call, tried: Mapping[Worker, str]) -> None:
        """Wait while the workers of the call's model that aren't in `tried` are paused and none is ready, or all that are are behind.

        Cancellation: the call leaves the gate at once.
        Raises: `NoWorker`; `CallAborted` when somebody aborts it there (not for one whose body goes on as it is: its answer isn't ours).
        """
        if not self.would_wait(call, tried):
            return
        with nullcontext() if call.relayed else self.aborts.waiting(call):
            await self._fleet.gate.wait_while(lambda: self.would_wait(call, tried))

    def model_of(self, call: Call) -> str:
        """The model that the call names, or would have got; empty when no worker has told one."""
        return call.model or next((w.models[0] for w in self._fleet.workers.values() if w.models and serves(w, call)), "")

    def would_wait(self, call: Call, tried: Mapping[Worker, str]) -> bool:
        """Whether the call would wait at the gate."""
        if self._left(call, tried).workers:
            return False
        return any(w.state in _HELD and w not in tried and serves(w, call) for w in self._fleet.workers.values())

    def demand(self, call: Call, tried: Mapping[Worker, str]) -> None:
        """Check that a worker is there that `place` could choose from. Raises as it does when none is."""
        self._ready(call, tried)

    def place(self, call: Call, tried: Mapping[Worker, str]) -> Placement:
        """Choose a worker that isn't in `tried`: those that were lost under this call, and how.

        Raises: `NotFound` for a model that the fleet doesn't serve, `BadRequest` when no worker's wire carries what the call needs, the
        model must be named, or no worker has the rank that was asked for, `NoWorker` when nobody is ready, `PluginFault`.
        """
        ready = self._carrying(call, tried)
        choice = self._choose(call, tuple(ready.lanes))
        lane = ready.lanes[choice.worker]
        return Placement(choice, lane if choice.rank is None else lane.at_rank(choice.rank))

    def candidates(self, call: Call) -> Sequence[Worker]:
        """The workers among which a policy would choose for the call now. Raises as `place` does when there is none."""
        return self._eligible(call, tuple(self._carrying(call, {}).lanes))

    def place_relayed(self, call: Call, tried: Mapping[Worker, str]) -> Choice:
        """Choose a worker with an HTTP server, for a call that goes there as it is. Raises as `place` does."""
        return self._choose(call, self._ready(call, tried).workers)

    def has_other(self, call: Call, tried: Mapping[Worker, str], worker: Worker) -> bool:
        """Whether a worker is ready that might take the call after `worker`."""
        return any(other is not worker for other in self._left(call, tried).workers)

    def obstacles(self, call: Call) -> dict[Worker, str]:
        """The workers that can't take the call, each with why in words, as far as plugins have no say in it."""
        late = self._behind(call)
        found: dict[Worker, str] = {}
        for worker in self._fleet.workers.values():
            if obstacle := _obstacle(worker, call) or late.get(worker, ""):
                found[worker] = obstacle
        return found

    def _behind(self, call: Call) -> Mapping[Worker, str]:
        lag = self.routing.settings.max_version_lag
        return {} if lag is None else behind((w for w in self._fleet.workers.values() if serves_model(w, call)), lag)

    def _choose(self, call: Call, candidates: tuple[Worker, ...]) -> Choice:
        return self.routing.choose(call, self._eligible(call, candidates))

    def _ready(self, call: Call, tried: Mapping[Worker, str]) -> Candidates:
        """At least one worker, and all of one model."""
        ready = self._left(call, tried)
        if not ready.workers:
            raise self._nobody(call, tried)
        if not call.model and len(ready.models) > 1:
            raise BadRequest(f"model: the fleet serves {', '.join(sorted(ready.models))}; name one", param="model")
        return ready

    def _carrying(self, call: Call, tried: Mapping[Worker, str]) -> Candidates:
        """At least one worker that has a wire for what the call needs."""
        ready = self._ready(call, tried)
        if not ready.lanes:
            wires = [lane.can for worker in ready.workers for lane in worker.lanes]
            missed = missing(call.needs, wires)
            message, field = refusal(missed, call.needed_by)
            closed = [f"; {w.id}: {w.http_closed}" for w in ready.workers if w.http_closed and missed & HTTP_CAN]
            raise BadRequest(message + "".join(closed), param=field)
        return ready

    def _left(self, call: Call, tried: Mapping[Worker, str]) -> Candidates:
        """The candidates but those that were tried or are behind."""
        candidates, late = self._candidates.of(call), self._behind(call)
        return candidates.without({*tried, *late}) if tried or late else candidates

    def _eligible(self, call: Call, workers: tuple[Worker, ...]) -> Sequence[Worker]:
        answers: list[Sequence[Worker]] = self._registry.call("eligible_workers", call=call, workers=workers)
        if not answers:
            return workers
        allowed = [frozenset(answer) for answer in answers]
        kept = tuple(w for w in workers if all(w in some for some in allowed))
        if not kept:
            raise NoWorker("no worker is eligible for this call")
        return kept

    def _nobody(self, call: Call, tried: Mapping[Worker, str]) -> CallError:
        known = {name for w in self._fleet.workers.values() for name in w.models}
        if call.model and known and call.model not in known:
            return NotFound(f"The model `{call.model}` does not exist. The fleet serves {', '.join(sorted(known))}.", param="model")
        serving = [w for w in self._fleet.workers.values() if serves_model(w, call)]
        if call.relayed and serving and all(w.http is None for w in serving):
            return CallError(501, "no worker has an HTTP server, which this route is relayed to: give one `http` in headrace.toml")
        if (rank := call.data_parallel_rank) is not None and serving and not any(has_rank(w, rank) for w in serving):
            ranks = ", ".join(map(str, sorted({rank for w in serving if w.info for rank in w.info.ranks}))) or "none yet"
            name = "x-data-parallel-rank"
            return BadRequest(f"{name}: there is no rank {rank} on any worker; there are {ranks}", param=name)
        obstacles = self.obstacles(call)
        if tried:
            left = [f"{w.id} ({reason})" for w, reason in tried.items()]
            left += [f"{w.id} ({obstacle})" for w, obstacle in obstacles.items() if w not in tried and w in self._behind(call)]
            return NoWorker(f"no worker is left: {', '.join(left)}")
        why = [f"{w.id} {obstacle}" for w, obstacle in obstacles.items()] or [
            f"{name} is being started" for name in sorted(self._fleet.coming)
        ]
        return NoWorker(f"no worker is ready: {', '.join(why) or 'the fleet is empty'}")


def _obstacle(worker: Worker, call: Call) -> str:
    """Why the worker can't take the call, in words; empty when it can."""
    if worker.state != "ready":
        return f"is {worker.state} ({worker.reason})"
    if not serves_model(worker, call):
        return f"serves {', '.join(worker.models)}"
    if call.role is None and worker.role in PARTIAL:
        return f"is for {worker.role} only"
    if call.role and worker.role != call.role:
        return f"is {worker.role}, and the call wants {call.role}"
    if call.relayed and worker.http is None:
        return "has no HTTP server"
    if call.data_parallel_rank is not None and not has_rank(worker, call.data_parallel_rank):
        return f"has no rank {call.data_parallel_rank}"
    return ""
