"""The journal: what is added stays, over restarts, and tells a new headrace which weights are broken."""

import contextlib
import re
import shutil
import sqlite3

import pytest
import trio
from click.testing import CliRunner
from trio.testing import wait_all_tasks_blocked

from core.cli import main
from core.fleet import journal as journal_module
from core.fleet.journal import KEPT, Journal
from core.settings import SettingsError
from tests.unit.core.engines import administered


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "journal.sqlite")


async def test_what_is_added_survives_the_end(path):
    journal = Journal(path)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(journal.run)
        await wait_all_tasks_blocked()
        journal.add("pause", ["a", "b"], by="me", outcome="ok", seconds=0.5)
        nursery.cancel_scope.cancel()
    [entry] = Journal(path).entries
    assert (entry.what, entry.by, entry.workers, entry.detail) == ("pause", "me", ("a", "b"), {"outcome": "ok", "seconds": 0.5})
    assert entry.at == journal.entries[0].at


async def test_the_latest_entries_are_shown_and_all_are_kept(path):
    journal = Journal(path)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(journal.run)
        for number in range(KEPT + 5):
            journal.add(str(number), [], by="me")
        await journal.flush()
        nursery.cancel_scope.cancel()
    assert [entry.what for entry in Journal(path).entries] == [str(number) for number in range(5, KEPT + 5)]
    assert list(sqlite3.connect(path).execute("SELECT count(*) FROM entries")) == [(KEPT + 5,)]


async def test_what_holds_is_known_however_old_it_is(path):
    journal = Journal(path)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(journal.run)
        journal.add("state", ["a"], by="me", state="whole", instance="1")
        journal.add("weights", ["a", "b"], by="me", of="model tiny", number=1)
        journal.add("weights", ["a"], by="me", of="model tiny", number=2)
        journal.add("weights", ["c"], by="me", of="model large", number=3)
        for number in range(KEPT):
            journal.add(str(number), [], by="me")
        await journal.flush()
        nursery.cancel_scope.cancel()
    for known in (journal, Journal(path)):
        assert known.last_state("a", "1") == {"state": "whole", "instance": "1"}
        assert known.last_state("a", "2") is None
        assert [entry.detail["number"] for entry in known.facts("weights")] == [2, 3]


async def test_without_a_path_it_is_in_memory():
    journal = Journal()
    await journal.run()
    journal.add("pause", [], by="me")
    await journal.flush()
    assert len(journal.entries) == 1


async def test_a_file_that_can_not_be_written_any_more_is_a_warning_and_nothing_else(tmp_path, monkeypatch):
    lines = []
    monkeypatch.setattr(journal_module.log, "warning", lambda event, **fields: lines.append((event, fields["entries"])))
    (tmp_path / "folder").mkdir()
    journal = Journal(str(tmp_path / "folder" / "journal.sqlite"))
    shutil.rmtree(tmp_path / "folder")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(journal.run)
        journal.add("pause", [], by="me")
        await journal.flush()
        nursery.cancel_scope.cancel()
    assert lines == [("journal.failed", 1)]


def no_database(folder):
    (folder / "journal").write_text("something else, longer than a header of SQLite would be; " * 10)
    return folder / "journal"


def no_entries(folder):
    with contextlib.closing(sqlite3.connect(folder / "other")) as connection:
        connection.executescript("CREATE TABLE entries (at, what, by, workers, detail); INSERT INTO entries VALUES (1, 2, 3, 4, 5);")
    return folder / "other"


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda folder: folder / "nowhere" / "journal", "unable to open database file"),
        (lambda folder: folder, "unable to open database file"),
        (no_database, "file is not a database"),
        (no_entries, ""),
    ],
)
def test_a_file_that_can_not_be_used_is_an_error_at_the_start_that_names_the_setting_and_the_file(tmp_path, make, why):
    path = make(tmp_path)
    with pytest.raises(SettingsError, match=f"^administration.journal: '{re.escape(str(path))}' can't be used: {why}.*$"):
        Journal(str(path))


def test_a_start_that_fails_leaves_nothing_that_the_next_one_takes_for_a_journal(path):
    assert not Journal(path).remembers
    assert not Journal(path).remembers


async def test_a_headrace_that_starts_again_knows_whose_weights_are_broken(path):
    async with administered(1, 1, 1, journal=path) as fleet:
        await fleet.update("7")
        fleet.administration.quarantine(fleet.workers[0], "it smells", by="me")
        await fleet.updating.start([fleet.workers[1]], by="me")
    async with administered(1, 1, 1, journal=path) as fleet:
        for worker in fleet.workers:
            fleet.rig.move(worker, "gone")
            fleet.rig.move(worker, "ready")
        assert [(worker.state, worker.reason) for worker in fleet.workers] == [
            ("quarantined", "it smells"),
            ("quarantined", "headrace ended in the middle of a weight update"),
            ("ready", "in a test"),
        ]
        await fleet.update("8")
        assert fleet.states == ["quarantined", "ready", "ready"], "somebody has taken the first one out"
        await fleet.administration.release(fleet.workers[0], by="me")
        assert fleet.states == ["ready"] * 3


async def test_a_drain_and_its_end_survive_a_restart(path):
    async with administered(1, 1, journal=path) as fleet:
        for worker in fleet.workers:
            fleet.administration.drain(worker, by="me")
        await fleet.administration.release(fleet.workers[1], by="me")
    async with administered(1, 1, journal=path) as fleet:
        for worker in fleet.workers:
            fleet.rig.move(worker, "gone")
            fleet.rig.move(worker, "ready")
        assert (fleet.states, fleet.workers[0].reason) == (["draining", "ready"], "by me")
        await fleet.administration.release(fleet.workers[0], by="me")
        assert fleet.states == ["ready", "ready"]


async def test_the_start_of_an_update_is_written_before_a_worker_hears_of_it(path):
    async with administered(1, journal=path) as fleet, trio.open_nursery() as nursery:
        fleet.engines[0].stalls["start"] = trio.Event()
        nursery.start_soon(fleet.start)
        with trio.fail_after(5):
            while "start" not in fleet.engines[0].asked:
                await trio.lowlevel.checkpoint()
        states = [entry.detail["state"] for entry in Journal(path).entries if entry.what == "state"]
        fleet.engines[0].stalls["start"].set()
    assert states == ["updating"]


def test_headrace_does_not_start_with_such_a_file_and_says_so_in_one_line(tmp_path):
    config = tmp_path / "headrace.toml"
    config.write_text(f'[administration]\njournal = "{tmp_path}/nowhere/journal"\n')
    result = CliRunner().invoke(main, ["serve", "--config", str(config), "--port", "0"])
    assert result.exit_code == 1
    assert re.fullmatch(r"headrace could not start: .*administration\.journal: '.*/nowhere/journal' can't be used: .*\n", result.output)
