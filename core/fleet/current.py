"""Which weights a cohort, or the workers of a model, have now: what a worker that comes late is measured by.

They are those of the latest complete update of everybody in it, whoever drove it, and lie in the journal. Before there was one, nobody is
late: all have the weights that they have started with.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from msgspec import Struct, field

from core.fleet.cohorts import Cohorts
from core.fleet.fleet import Fleet
from core.fleet.journal import Journal
from core.fleet.worker import Worker


class Weights(Struct, frozen=True):
    """The weights that an update has brought. Of two, the later has the higher number."""

    number: int
    #: `None` when the trainer gave them no version.
    version: str | None
    #: The transport, or the method of the workers, and its options, when these alone bring a late worker the same weights; else empty.
    transport: str = ""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])


class CurrentWeights:
    """By cohort, for workers that are in a named one, and by model for the others."""

    def __init__(self, fleet: Fleet, cohorts: Cohorts, journal: Journal) -> None:
        self._fleet = fleet
        self._cohorts = cohorts
        self._journal = journal
        self._of = {entry.detail["of"]: msgspec.convert(entry.detail["weights"], Weights) for entry in journal.facts("weights")}
        numbers = [weights.number for weights in self._of.values()]
        numbers += [entry.detail.get("weights", 0) for entry in journal.facts("state")]
        self._number = max(numbers, default=0)

    def of(self, worker: Worker) -> Weights | None:
        """What the worker should have; `None` when there was no update."""
        return self._of.get(self.whose(worker))

    def next_number(self) -> int:
        """The number of an update that has just been completed."""
        self._number += 1
        return self._number

    def replace(self, weights: Weights, updated: Iterable[Worker], asked: Iterable[Worker]) -> None:
        """`updated` have these now. They are everybody's when all workers of the cohort or the model are among the `asked`."""
        asked = set(asked)
        for whose in {self.whose(worker) for worker in updated}:
            everybody = self._everybody(whose)
            if asked.issuperset(everybody):
                self._put(whose, weights, everybody)

    def relabel(self, workers: Iterable[Worker], version: str) -> None:
        """These workers' weights, which stay, have another version now."""
        labelled = set(workers)
        for whose, weights in list(self._of.items()):
            everybody = self._everybody(whose)
            if everybody and labelled.issuperset(everybody) and weights.version != version:
                self._put(whose, msgspec.structs.replace(weights, version=version), everybody)

    def whose(self, worker: Worker) -> str:
        """Those with the same have the same weights: the members of a cohort, and the other workers of a model."""
        cohort = self._cohorts.name_of(worker)
        return f"cohort {cohort}" if cohort else f"model {worker.models[0]}"

    def describe(self) -> dict[str, dict[str, Any]]:
        """Its part of `GET /fleet`."""
        return {whose: {"version": weights.version, "transport": weights.transport or None} for whose, weights in self._of.items()}

    def _everybody(self, whose: str) -> list[Worker]:
        return [worker for worker in self._fleet.workers.values() if worker.is_there and self.whose(worker) == whose]

    def _put(self, whose: str, weights: Weights, workers: Iterable[Worker]) -> None:
        self._of[whose] = weights
        self._journal.add("weights", [worker.id for worker in workers], by="headrace", of=whose, weights=msgspec.to_builtins(weights))
