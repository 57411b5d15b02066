"""What `GET /metrics` shows: calls as they settle, and the fleet as it is when it is asked."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from core.call import Outcome
from core.errors import shorten
from core.fleet.fleet import Fleet
from core.fleet.progress import Update

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
            "headrace_weight_updates", "Weight updates that headrace drove and that ended", ["transport", "outcome"], registry=self.registry
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

    def updated(self, update: Update) -> None:
        """Count a weight update that has ended."""
        transport = update.request.transport
        self._updates.labels(transport, "failed" if update.failure else "succeeded").inc()
        self._update_seconds.labels(transport).observe(update.seconds)

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
