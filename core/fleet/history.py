"""The weight updates that headraces before this one were asked for, as the journal tells of them."""

from collections.abc import Iterable
from typing import Any, Final

from core.fleet.journal import Entry, Journal

#: The end of an update that a headrace has not lived to see.
CUT: Final = "headrace ended in the middle of it"


def past_updates(journal: Journal) -> dict[str, dict[str, Any]]:
    """By id, in the order in which they were asked for, as `GET /fleet/updates/<id>` shows them; those that were cut get their end."""
    asked: dict[str, Entry] = {}
    ended: dict[str, Entry] = {}
    for entry in journal.entries:
        if entry.what == "update_asked":
            asked[entry.detail["id"]] = entry
        elif entry.what == "update":
            ended[entry.detail["id"]] = entry
    for id_, entry in asked.items():
        if id_ not in ended:
            journal.add("update", entry.workers, by=entry.by, **entry.detail, outcome=CUT, seconds=0.0)
            ended[id_] = journal.entries[-1]
    order = [*(id_ for id_ in ended if id_ not in asked), *asked]
    return {id_: _shown(ended[id_]) for id_ in order}


def _shown(entry: Entry) -> dict[str, Any]:
    told, outcome = entry.detail, entry.detail["outcome"]
    good = outcome == "ok"
    return {
        "id": told["id"],
        "version": told["version"],
        "transport": told["transport"],
        "status": "succeeded" if good else "failed",
        "error": None if good else outcome,
        "phase": "done",
        "workers": told.get("progress") or _unknown(entry.workers, good=good),
        "seconds": told["seconds"],
        "by": entry.by,
    }


def _unknown(workers: Iterable[str], *, good: bool) -> dict[str, Any]:
    reason = "" if good else "nobody knows how far it came"
    return {worker: {"status": "done" if good else "failed", "reason": reason, "seconds": None} for worker in workers}
