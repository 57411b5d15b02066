"""What becomes of the workers by their answers to a step of an update."""

from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

from core.errors import CallError
from core.fleet.control import ControlFailed
from core.fleet.operations import Answers, FleetFailed, Operation
from core.fleet.standings import Standings
from core.fleet.trainer_updates import TrainerUpdate


def judge(standings: Standings, operation: Operation, answers: Answers[Any], opened: Iterable[TrainerUpdate] = ()) -> None:
    """Quarantine who failed, unless nobody did anything, and who was lost since the update was `opened`. Raises: `FleetFailed`."""
    if answers.failures and answers.refused:
        raise FleetFailed(operation.name, answers.failures, "Nothing has changed")
    failures = dict(answers.failures)
    for one in opened:
        for worker, reason in one.lost().items():
            if worker not in answers.good and worker not in failures:
                failures[worker] = ControlFailed(worker.id, operation.name, CallError(HTTPStatus.CONFLICT, reason))
                standings.lose(worker, f"{operation.name}: {reason}", one)
    for worker, failure in answers.failures.items():
        standings.fail(worker, f"{operation.name}: {failure.reason}")
    if failures:
        raise FleetFailed(operation.name, failures, "Quarantined; the other workers go on")
