"""Cohorts that trainers have named: pinned members in rank order, until the trainer selects anew."""

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from core.errors import BadRequest, CallError, NotFound, NoWorker
from core.fleet.cohort import Cohort
from core.fleet.fleet import Fleet
from core.fleet.groups import in_rank_order
from core.fleet.journal import Journal
from core.fleet.worker import Worker


class NamedCohort(Struct, frozen=True):
    """The workers of a model that a trainer has selected, as they were then."""

    name: str
    model: str
    members: Cohort
    #: Whether an update goes on with who is there: another process in a member's place, and without members that are lost.
    substitution: bool = False


class Cohorts:
    """The named cohorts. A worker is in one at most; what is asked of all workers of a model is asked of those in cohorts, too.

    They lie in the journal, so that they survive a restart of headrace.
    """

    def __init__(self, fleet: Fleet, journal: Journal) -> None:
        self._fleet = fleet
        self._journal = journal
        self._named: dict[str, NamedCohort] = {}
        for entry in journal.facts("cohort"):
            if entry.detail["cohort"] is not None:
                self._named[entry.detail["of"]] = msgspec.convert(entry.detail["cohort"], NamedCohort)

    def select(self, name: str, model: str, workers: Sequence[Worker], *, substitution: bool, by: str) -> NamedCohort:
        """Pin these workers, which are there and in rank order, in the place of those that the cohort had.

        Raises: `BadRequest` for a worker that is there twice or serves another model; `CallError` (409) for one of another cohort.
        """
        if (ordered := in_rank_order(workers)) != list(workers):
            names = ", ".join(worker.id for worker in ordered)
            text = f"workers: parts of a data-parallel group stand together, in the order of their ranks: {names}"
            raise BadRequest(text, param="workers")
        for index, worker in enumerate(workers):
            if worker in workers[:index]:
                raise BadRequest(f"workers: {worker.id!r} is there twice", param="workers")
            if model not in worker.models:
                raise BadRequest(f"workers: {worker.id!r} serves {', '.join(worker.models)}, and not {model!r}", param="workers")
            holder = self.of(worker)
            if holder and holder.name != name:
                text = f"workers: {worker.id!r} is in the cohort {holder.name!r}, and a worker can be in one only"
                raise CallError(HTTPStatus.CONFLICT, text, param="workers")
        return self._pin(NamedCohort(name, model, Cohort.of(workers), substitution), by)

    def drop(self, name: str, *, by: str) -> None:
        """Forget a cohort; nothing is done to its workers. Raises: `NotFound`."""
        cohort = self.get(name)
        del self._named[name]
        self._journal.add("cohort", _ids(cohort), by=by, of=name, cohort=None)

    def get(self, name: str) -> NamedCohort:
        """The cohort of that name. Raises: `NotFound`."""
        if cohort := self._named.get(name):
            return cohort
        raise NotFound(f"cohort: there is none {name!r}; there are {', '.join(self._named) or 'none at all'}", param="cohort")

    def of(self, worker: Worker) -> NamedCohort | None:
        """The cohort that a worker is in."""
        return next((cohort for cohort in self._named.values() if worker.id in _ids(cohort)), None)

    def name_of(self, worker: Worker) -> str | None:
        """The name of that cohort."""
        cohort = self.of(worker)
        return cohort.name if cohort else None

    def present(self, name: str) -> list[Worker]:
        """The members that are there now, whoever they are, in rank order. Raises: `NotFound`; `NoWorker` when there is none."""
        members = [self._fleet.workers.get(id_) for id_ in _ids(self.get(name))]
        present = [worker for worker in members if worker and worker.is_there]
        if not present:
            raise NoWorker(f"no worker of the cohort {name!r} is there")
        return present

    def whole(self, name: str, *, by: str) -> list[Worker]:
        """The members, for an update: all of them as they were selected, or, with substitution, who is there in their places.

        Raises: `NotFound`; `CallError` (409), which names each member that is lost or replaced; `NoWorker`.
        """
        cohort = self.get(name)
        changes = cohort.members.changes(self._fleet.workers)
        if not changes:
            return self.present(name)
        if not cohort.substitution:
            text = f"the cohort {name!r} isn't what was selected: {'; '.join(changes)}. Select it anew (POST /fleet/cohorts)"
            raise CallError(HTTPStatus.CONFLICT, text, param="cohort")
        present = self.present(name)
        known = {member.id: member for member in cohort.members.members}
        now = {member.id: member for member in Cohort.of(present).members}
        # Who is lost keeps its place for the time when it comes back.
        members = tuple(now.get(id_, member) for id_, member in known.items())
        self._pin(replace(cohort, members=Cohort(members)), by)
        return present

    def describe(self) -> list[dict[str, Any]]:
        """`GET /fleet/cohorts`."""
        return [self.describe_one(cohort) for cohort in self._named.values()]

    def describe_one(self, cohort: NamedCohort) -> dict[str, Any]:
        """A cohort, and what has become of its members since."""
        return {
            "name": cohort.name,
            "model": cohort.model,
            "workers": _ids(cohort),
            "ranks": cohort.members.ranks,
            "substitution": cohort.substitution,
            "changes": cohort.members.changes(self._fleet.workers),
        }

    def _pin(self, cohort: NamedCohort, by: str) -> NamedCohort:
        self._named[cohort.name] = cohort
        self._journal.add("cohort", _ids(cohort), by=by, of=cohort.name, cohort=msgspec.to_builtins(cohort))
        return cohort


def _ids(cohort: NamedCohort) -> list[str]:
    return [member.id for member in cohort.members.members]
