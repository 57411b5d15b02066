"""What `GET /metrics` shows: calls as they settle, and the fleet as it is when it is asked."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from core.call import Outcome
from core.errors import shorten
from core.fleet.administration import Administration
from core.fleet.fleet import Fleet

#: Rollouts take from milliseconds to hours.
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200)


class Metrics:
    """The proxy's own metrics. Labels are bounded: outcomes, wires, and the workers of the fleet."""

    def __init__(self, fleet: Fleet) -> None:
        disable_created_metrics()  # as many series again, which nobody charts
        self.registry = CollectorRegistry()
        self._calls = Counter("headrace_calls", "Calls that have settled", ["outcome", "worker", "wire"], registry=self.registry)
        self._attempts = Counter("headrace_call_retries", "Further workers that were tried for calls", registry=self.registry)
        self._prompt = Counter("headrace_prompt_tokens", "Prompt tokens of calls that have settled", registry=self.registry)
        self._cached = Counter("headrace_cached_tokens", "Prompt tokens that came from a prefix cache", registry=self.registry)
        self._output = Counter("headrace_output_tokens", "Output tokens", registry=self.registry)
        self._seconds = Histogram("headrace_call_seconds", "From arrival to settling", buckets=_SECONDS, registry=self.registry)
        self._first = Histogram(
            "headrace_first_output_seconds", "From arrival to the first output", buckets=_SECONDS, registry=self.registry
        )
        self._legs = Counter(
            "headrace_legs", "Parts of calls that were done before the rest", ["role", "outcome", "worker"], registry=self.registry
        )
        self._leg_seconds = Histogram("headrace_leg_seconds", "Of a leg", ["role"], buckets=_SECONDS, registry=self.registry)
        self._updates = Counter(
            "headrace_weight_updates", "Weight updates that ended, whoever drove them", ["transport", "outcome"], registry=self.registry
        )
        self._update_seconds = Histogram(
            "headrace_weight_update_seconds", "From asking for one to its end", ["transport"], buckets=_SECONDS, registry=self.registry
        )
        pauses = Histogram("headrace_pause_seconds", "A worker was paused or updated for", buckets=_SECONDS, registry=self.registry)
        gate = Histogram(
            "headrace_gate_seconds", "A call that had to wait at the gate did so for", buckets=_SECONDS, registry=self.registry
        )
        fleet.stood_still, fleet.gate.waited = pauses.observe, gate.observe
        self.registry.register(_FleetCollector(fleet))

    def watch(self, administration: Administration) -> None:
        """Count its weight updates as they end, and tell for how long its operations and updates run."""
        administration.updates.ended = lambda update: self._updated(update.request.transport, bool(update.failure), update.seconds)
        administration.trainers.ended = lambda update: self._updated(update.transport, bool(update.error), update.seconds)
        self.registry.register(_AdministrationCollector(administration))

    def _updated(self, transport: str, failed: bool, seconds: float) -> None:
        self._updates.labels(transport, "failed" if failed else "succeeded").inc()
        self._update_seconds.labels(transport).observe(seconds)

    def settled(self, outcome: Outcome) -> None:
        """Count a call."""
        self._calls.labels(outcome.kind, outcome.worker, outcome.wire).inc()
        if outcome.attempts > 1:
            self._attempts.inc(outcome.attempts - 1)
        self._prompt.inc(outcome.prompt_tokens)
        self._cached.inc(outcome.cached_tokens or 0)
        self._output.inc(outcome.output_tokens)
        self._seconds.observe(outcome.seconds)
        if outcome.first_output_seconds is not None:
            self._first.observe(outcome.first_output_seconds)

    def leg_settled(self, role: str, outcome: Outcome) -> None:
        """Count a leg."""
        self._legs.labels(role, outcome.kind, outcome.worker).inc()
        self._leg_seconds.labels(role).observe(outcome.seconds)

    def text(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self.registry)


class _FleetCollector(Collector):
    """Gauges made on each scrape, so that a worker that has left leaves no series behind."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        states = GaugeMetricFamily("headrace_worker_state", "1 for the state that a worker is in", labels=["worker", "state"])
        in_flight = GaugeMetricFamily("headrace_worker_in_flight", "Calls that are on a worker", labels=["worker"])
        versions = GaugeMetricFamily("headrace_policy_version", "1 for the version of a worker's weights", labels=["worker", "version"])
        restarts = CounterMetricFamily("headrace_worker_restarts", "Processes started in the place of one that ended", labels=["worker"])
        for worker in self._fleet.workers.values():
            states.add_metric([worker.id, worker.state], 1)
            in_flight.add_metric([worker.id], worker.in_flight)
            if worker.policy_version is not None:
                versions.add_metric([worker.id, shorten(worker.policy_version, 200)], 1)
            if worker.process:
                restarts.add_metric([worker.id], max(worker.process.starts - 1, 0))
        yield from (states, in_flight, versions, restarts)
        quarantined = [worker for worker in self._fleet.workers.values() if worker.state == "quarantined"]
        yield GaugeMetricFamily(
            "headrace_quarantined_workers", "Workers that take no calls until they are updated or released", value=len(quarantined)
        )
        reasons = GaugeMetricFamily("headrace_quarantine", "1 for each of these workers, with the reason", labels=["worker", "reason"])
        for worker in quarantined:
            reasons.add_metric([worker.id, shorten(worker.reason, 200)], 1)
        yield reasons
        yield GaugeMetricFamily("headrace_gate_waiting", "Calls that wait at the gate", value=self._fleet.gate.waiting)


class _AdministrationCollector(Collector):
    """How long what runs has run: what hangs goes up for ever, where a counter of ends would only stand still."""

    def __init__(self, administration: Administration) -> None:
        self._administration = administration

    def collect(self) -> Iterator[Metric]:
        running: dict[str, float] = {}
        for operation in self._administration.describe():
            name = operation["operation"].partition(" ")[0]
            running[name] = max(running.get(name, 0.0), operation["seconds"])
        operations = GaugeMetricFamily(
            "headrace_operation_running_seconds", "Since the oldest of these operations that runs was asked for", labels=["operation"]
        )
        for name, seconds in running.items():
            operations.add_metric([name], seconds)
        yield operations
        updates = self._administration.describe_updates()
        oldest = max((update["seconds"] for update in updates), default=0.0)
        yield GaugeMetricFamily("headrace_weight_update_running_seconds", "Since the oldest that isn't over was asked for", value=oldest)
        silent = max((update["silent"] or 0.0 for update in updates), default=0.0)
        yield GaugeMetricFamily(
            "headrace_weight_update_silent_seconds", "For how long the trainer of one that is open has been silent", value=silent
        )
