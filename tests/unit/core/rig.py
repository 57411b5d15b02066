"""A fleet with the whole path around it, in memory, and clients that are plain ASGI callables."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import trio

from core.call import Call, Outcome, SamplingParams
from core.fleet.fleet import Fleet
from core.fleet.worker import Observed, State, Worker, WorkerInfo
from core.hookspecs import hookimpl
from core.metrics import Metrics
from core.northbound.generate import GenerateRoute
from core.path import Path
from core.placement import Placer
from core.registry import Loaded, Registry
from core.routing import Routing
from core.serving.client import Clients
from core.settings import GateSettings, ProbeSettings, Role, RoutingSettings, ServerSettings, WorkerSettings
from core.wire.lane import Lane
from plugins.routing_round_robin import RoundRobin

Message = Mapping[str, Any]


def make_worker(name: str, *lanes: Lane, models: Sequence[str] = ("tiny",), state: State = "ready", role: Role = "aggregated") -> Worker:
    """A worker that was introduced, and is in that state."""
    worker = Worker(WorkerSettings(grpc="127.0.0.1:50051", id=name, role=role))
    worker.info = WorkerInfo(models=tuple(models), model_id=models[0], max_model_len=100)
    worker.lanes = lanes
    worker.state = state
    worker.reason = "" if state == "ready" else f"{state} in a test"
    worker.observed = Observed(worker.state, worker.reason)
    return worker


def make_call(**fields: Any) -> Call:
    """A call of three tokens."""
    return Call(**{"id": "r1", "token_ids": [1, 2, 3], "sampling": SamplingParams(), **fields})


class Witness:
    """A plugin that notes how calls settled."""

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []

    @hookimpl
    def call_settled(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)


class Rig:
    """Everything between the ASGI server and the lanes. `plugins` are called by their name: `p0`, `p1`, …"""

    def __init__(
        self,
        *workers: Worker,
        plugins: Sequence[object] = (),
        retries: int = 2,
        gate: GateSettings | None = None,
        server: ServerSettings | None = None,
        policies: Sequence[str] = ("round-robin",),
        routing: RoutingSettings | None = None,
    ) -> None:
        self.witness = Witness()
        loaded = [Loaded("round-robin", RoundRobin()), Loaded("witness", self.witness)]
        loaded += [Loaded(f"p{i}", plugin) for i, plugin in enumerate(plugins)]
        self.registry = Registry(loaded, policies)
        self.fleet = Fleet(ProbeSettings(), gate or GateSettings(), self.registry)
        for worker in workers:
            self.fleet.workers[worker.id] = worker
        self.fleet.ready = tuple(w for w in workers if w.state == "ready")
        self.workers = workers
        self.metrics = Metrics(self.fleet)
        self.routing = Routing(self.registry, routing or RoutingSettings(policies=list(policies)))
        self.placer = Placer(self.registry, self.fleet, self.routing)
        self.path = Path(self.registry, self.placer, self.metrics, retries=retries)
        server = server or ServerSettings()
        self.clients = Clients(server.stall_timeout)
        self.route = GenerateRoute(self.path, self.clients, server)

    def move(self, worker: Worker, state: State, reason: str = "in a test") -> None:
        """What the fleet does when a probe says so."""
        self.fleet._set(worker, state, reason)

    @property
    def outcome(self) -> Outcome:
        """How the one call settled."""
        [outcome] = self.witness.outcomes
        return outcome

    @property
    def in_flight(self) -> list[int]:
        return [worker.in_flight for worker in self.workers]


class Browser:
    """One request of a client, as ASGI's two callables. `gone` is set when it closes its connection."""

    def __init__(
        self,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        *,
        method: str = "POST",
        path: str = "/inference/v1/generate",
        query: str = "",
    ) -> None:
        wanted = {"token_ids": [1, 2, 3], "sampling_params": {}} if body is None else body
        self._body = wanted if isinstance(wanted, bytes) else msgspec.json.encode(wanted)
        self.scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in (headers or {}).items()],
            "http_version": "1.1",
            "scheme": "http",
            "root_path": "",
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "extensions": {},
        }
        self.gone = trio.Event()
        #: When set to an event, `send` waits for it, as it does for a client that doesn't read.
        self.reads: trio.Event | None = None
        self.messages: list[Message] = []
        #: Virtual times of the messages.
        self.times: list[float] = []

    async def receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        await trio.lowlevel.checkpoint()
        if self.reads is not None:
            with trio.CancelScope(shield=True):  # as hypercorn's trio worker does
                await self.reads.wait()
        self.messages.append(message)
        self.times.append(trio.current_time())

    async def ask(self, rig: Rig) -> "Browser":
        await rig.route(self.scope, self.receive, self.send)
        return self

    @property
    def status(self) -> int:
        return self.messages[0]["status"]

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode("latin-1"): value.decode("latin-1") for name, value in self.messages[0]["headers"]}

    @property
    def raw(self) -> bytes:
        return b"".join(message["body"] for message in self.messages[1:])

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.raw)

    @property
    def complete(self) -> bool:
        return bool(self.messages) and not self.messages[-1].get("more_body", True)

    @property
    def events(self) -> list[Any]:
        """The data of each event, decoded; comments are left out, `[DONE]` stays as it is."""
        parts = [part.removeprefix("data: ") for part in self.raw.decode().split("\n\n") if part.startswith("data: ")]
        return [part if part == "[DONE]" else msgspec.json.decode(part) for part in parts]
