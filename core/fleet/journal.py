"""The journal: who changed what in the fleet, and when. Entries are added, and never changed."""

import contextlib
import math
import sqlite3
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import structlog
import trio
from msgspec import Struct

from core.settings import SettingsError

log = structlog.stdlib.get_logger()

#: Entries that are kept in memory, and shown.
KEPT: Final = 1000
#: What holds until the next entry of its kind about the same: these are known however old they are. `detail["of"]` says about what; a
#: `state` is about its one worker.
FACTS: Final = ("state", "cohort", "weights", "frozen", "group")
_SCHEMA: Final = "CREATE TABLE IF NOT EXISTS entries (at REAL, what TEXT, by TEXT, workers TEXT, detail TEXT)"
_SELECT: Final = "SELECT at, what, by, workers, detail FROM entries ORDER BY rowid DESC LIMIT ?"
_SELECT_FACTS: Final = """
    SELECT at, what, by, workers, detail FROM entries WHERE rowid IN (
        SELECT max(rowid) FROM entries WHERE what IN ('state', 'cohort', 'weights', 'frozen', 'group')
        GROUP BY what, ifnull(json_extract(detail, '$.of'), workers)
    ) ORDER BY rowid
"""
#: For one write, which nothing else can end.
_WRITE_SECONDS: Final = 5.0


class Entry(Struct, frozen=True):
    """One transition. `at` is Unix time in seconds, `by` whoever asked for it: a client's address and name, or `headrace`."""

    at: float
    #: An operation (`pause`, `update_weights`, …), `state` for what became of one worker, `cohort` for who is in one, `weights` for those
    #: that a cohort or the workers of a model have now, `frozen` for whom headrace has paused for an update, `group` for who has joined
    #: a trainer's group.
    what: str
    by: str
    workers: tuple[str, ...]
    #: `outcome` and `seconds` of an operation; `state`, `reason` and `instance` of a worker.
    detail: dict[str, Any]


class Journal:
    """The latest entries in memory, and all of them in an SQLite file when there is a path.

    Writing never waits for the file, and a file that can't be written any more is a warning in the log: the fleet goes on.

    Raises (constructor): `SettingsError` for a file that can't be used, since its owner counts on what it keeps.
    """

    def __init__(self, path: str = "") -> None:
        self._path = path
        self.entries: deque[Entry] = deque(maxlen=KEPT)
        self._facts: dict[tuple[str, str], Entry] = {}
        #: Whether a headrace before this one has kept it, from its beginning on: what isn't there was not done.
        self.remembers = False
        self._send, self._receive = trio.open_memory_channel[Entry | trio.Event](math.inf)
        if path and (known := _read(path)):
            entries, facts = known
            self.remembers = True
            self.entries.extend(entries)
            for entry in facts:
                self._note(entry)

    def add(self, what: str, workers: Sequence[str], *, by: str, **detail: Any) -> None:
        """Add an entry, with the time of now."""
        entry = Entry(time.time(), what, by, tuple(workers), detail)
        self.entries.append(entry)
        self._note(entry)
        if self._path:
            self._send.send_nowait(entry)

    async def flush(self) -> None:
        """Wait until everything so far lies in the file; for what has to be known after a crash. Needs `run`. Cancellation: safe."""
        if self._path:
            written = trio.Event()
            self._send.send_nowait(written)
            await written.wait()

    def last_state(self, worker: str, instance: str | None = None) -> dict[str, Any] | None:
        """What the last entry says of this process of a worker, or of whichever: `state`, `reason`, `instance`; `None` if there is none."""
        entry = self._facts.get(("state", worker))
        return entry.detail if entry and instance in {None, entry.detail["instance"]} else None

    def facts(self, what: str) -> list[Entry]:
        """The latest entry of this kind about each, the oldest first."""
        return sorted((entry for (kind, _), entry in self._facts.items() if kind == what), key=lambda entry: entry.at)

    async def run(self) -> None:
        """Write what is added. Cancellation: what was added before is written, and that is the end; a write has five seconds."""
        if not self._path:
            return
        try:
            await self._write([], begin=True)
            while True:
                await self._write([await self._receive.receive()])
        finally:
            await self._write([])

    def _note(self, entry: Entry) -> None:
        if entry.what in FACTS:
            self._facts[entry.what, entry.detail.get("of") or entry.workers[0]] = entry

    async def _write(self, batch: list[Entry | trio.Event], *, begin: bool = False) -> None:
        while True:
            try:
                batch.append(self._receive.receive_nowait())
            except trio.WouldBlock:
                break
        rows = [_row(item) for item in batch if isinstance(item, Entry)]
        try:
            if rows or begin:
                with trio.CancelScope(shield=True), trio.fail_after(_WRITE_SECONDS):
                    await trio.to_thread.run_sync(_append, self._path, rows, abandon_on_cancel=True)
        except (sqlite3.Error, trio.TooSlowError) as error:
            log.warning("journal.failed", path=self._path, error=str(error) or "too slow", entries=len(rows))
        finally:
            for item in batch:
                if isinstance(item, trio.Event):
                    item.set()


def _row(entry: Entry) -> tuple[float, str, str, str, str]:
    workers, detail = (msgspec.json.encode(value).decode() for value in (entry.workers, entry.detail))
    return entry.at, entry.what, entry.by, workers, detail


def _append(path: str, rows: list[tuple[float, str, str, str, str]]) -> None:
    connection = sqlite3.connect(path)
    try:
        with connection:
            connection.execute(_SCHEMA)
            connection.executemany("INSERT INTO entries VALUES (?, ?, ?, ?, ?)", rows)
    finally:
        connection.close()


def _read(path: str) -> tuple[list[Entry], list[Entry]] | None:
    """The latest entries of the file, and the latest fact about each, the oldest first; `None` when no headrace has kept it before.

    Raises: `SettingsError` when it can't be read, or nothing can be written to it.
    """
    try:
        with contextlib.closing(sqlite3.connect(path)) as connection:
            connection.execute("BEGIN IMMEDIATE")  # fails where nothing can be written, and writes nothing
            if connection.execute("SELECT name FROM sqlite_master WHERE name = 'entries'").fetchone() is None:
                return None
            latest = connection.execute(_SELECT, (KEPT,)).fetchall()
            facts = connection.execute(_SELECT_FACTS).fetchall()
        return [_entry(*row) for row in reversed(latest)], [_entry(*row) for row in facts]
    except (sqlite3.Error, msgspec.MsgspecError, TypeError) as error:  # the last two: rows that are no entries
        raise SettingsError(f"administration.journal: {path!r} can't be used: {error}; name a journal, or a file to begin one") from error


def _entry(at: float, what: str, by: str, workers: str, detail: str) -> Entry:
    return Entry(at, what, by, msgspec.json.decode(workers, type=tuple[str, ...]), msgspec.json.decode(detail, type=dict[str, Any]))
