"""Workers that headrace finds paused when it starts: what it knows of them, and what becomes of them; on the virtual clock."""

import pytest
import trio
from msgspec.structs import replace
from trio.testing import wait_all_tasks_blocked

from core.fleet import administration as administration_module
from core.fleet import arrivals as arrivals_module
from tests.unit.core.engines import administered


def find(fleet, *states, sleep: bool = False) -> None:
    """What a headrace finds that has just begun."""
    for worker, engine, state in zip(fleet.workers, fleet.engines, states, strict=True):
        worker.info = replace(worker.info, supports_sleep=sleep)
        engine.paused = state == "paused"
        fleet.rig.move(worker, "gone")
        fleet.rig.move(worker, state)


async def pass_time(clock, seconds: float) -> None:
    """Without jumps in between, which a journal's thread would take for a file that is too slow."""
    await wait_all_tasks_blocked()
    clock.jump(seconds)
    await wait_all_tasks_blocked()


async def test_workers_that_are_found_paused_at_the_start_go_on_when_nobody_cares_for_them(monkeypatch, mock_clock, tmp_path):
    lines = []
    monkeypatch.setattr(administration_module.log, "error", lambda event, **fields: lines.append((event, fields)))
    path = str(tmp_path / "journal.sqlite")
    async with administered(journal=path) as fleet:
        await fleet.pause()
    async with administered(lease=100.0, journal=path) as fleet:
        find(fleet, "paused", "ready", sleep=True)
        await pass_time(mock_clock, 99)
        assert fleet.states == ["paused", "ready"]
        await pass_time(mock_clock, 2)
        assert (fleet.states, fleet.engines[0].paused) == (["ready", "ready"], False)
        assert lines == [("fleet.lease_ended", {"workers": ["w0"], "seconds": 100.0})]
        fleet.rig.move(fleet.workers[0], "paused")  # by somebody who goes past headrace
        await pass_time(mock_clock, 200)
        assert fleet.states == ["paused", "ready"]


def find_half_updated(fleet) -> None:
    """They were left between the start and the end of an update."""
    find(fleet, *["paused"] * len(fleet.workers))
    for engine in fleet.engines:
        engine.updating = engine.broken = True


async def test_without_a_journal_nobody_knows_the_weights_of_workers_that_are_found_paused_so_they_are_not_resumed(autojump_clock):
    async with administered(lease=100.0) as fleet:
        find_half_updated(fleet)
        await trio.sleep(101)
        assert [worker.state for worker in fleet.workers] == ["quarantined"] * 2
        assert fleet.workers[1].reason == (
            "it was paused when headrace came, and nobody knows whether its weights are whole: "
            "update the fleet, or take it as it is (POST /fleet/workers/w1/release)"
        )
        fleet.engines[1].updating = fleet.engines[1].broken = False
        await fleet.administration.release(fleet.workers[1], by="me")
        assert (fleet.states, fleet.engines[1].paused) == (["quarantined", "ready"], False)
        await fleet.update("9")
        assert (fleet.states, [engine.version for engine in fleet.engines]) == (["ready", "ready"], ["9", "9"])


async def test_a_journal_that_is_new_knows_no_more_than_none(mock_clock, tmp_path):
    async with administered(lease=100.0, journal=str(tmp_path / "journal.sqlite")) as fleet:
        find_half_updated(fleet)
        await pass_time(mock_clock, 101)
        assert fleet.states == ["quarantined", "quarantined"]


@pytest.mark.parametrize("sleep", [False, True])
async def test_a_pause_of_workers_that_nobody_knows_waits_for_no_call_and_its_lease_resumes_nobody(autojump_clock, sleep):
    async with administered(lease=100.0) as fleet:
        find_half_updated(fleet)
        for worker in fleet.workers:
            assert worker.info
            worker.info = replace(worker.info, supports_sleep=sleep)
        await fleet.pause(mode="wait")
        await trio.sleep(101)
        assert (fleet.states, [engine.dead for engine in fleet.engines]) == (["quarantined"] * 2, [False, False])


async def test_a_trainer_that_comes_back_after_a_restart_of_headrace_can_update_whom_nobody_knows(autojump_clock):
    async with administered(lease=100.0) as fleet:
        find_half_updated(fleet)
        await fleet.pause()
        await fleet.update("9")
        assert fleet.states == ["paused", "paused"]
        await trio.sleep(101)
        assert fleet.states == ["ready", "ready"]


async def test_a_trainer_resumes_whom_it_has_paused_though_headrace_was_started_anew_meanwhile():
    async with administered(lease=100.0) as fleet:
        find(fleet, "paused", "paused")
        await fleet.resume()
        assert fleet.states == ["ready", "ready"]


def forget_the_names(fleet) -> None:
    """Workers without gRPC don't tell which process they are."""
    for number, worker in enumerate(fleet.workers):
        worker.info = replace(worker.info, instance_id="")
        worker.introduced_at = float(number)


@pytest.mark.parametrize("left", ["half updated", "whole"])
async def test_a_process_without_a_name_that_is_found_paused_is_the_one_that_the_journal_knows(mock_clock, tmp_path, left):
    path = str(tmp_path / "journal.sqlite")
    async with administered(journal=path) as fleet:
        forget_the_names(fleet)
        await fleet.update("8")
        await fleet.pause()
        if left == "half updated":
            await fleet.start()
    async with administered(lease=100.0, journal=path) as fleet:
        forget_the_names(fleet)
        for worker in fleet.workers:
            worker.policy_version = "8"
            worker.introduced_at += 100
        if left == "half updated":
            find_half_updated(fleet)
            assert {worker.reason for worker in fleet.workers} == {"headrace ended in the middle of a weight update"}
        else:
            find(fleet, "paused", "paused")
        await pass_time(mock_clock, 101)
        assert fleet.states == (["quarantined"] * 2 if left == "half updated" else ["ready"] * 2)
        await fleet.update("9")
        await fleet.resume()
        assert fleet.states == ["ready", "ready"]


async def test_a_process_without_a_name_that_is_found_running_is_a_new_one(tmp_path):
    path = str(tmp_path / "journal.sqlite")
    async with administered(journal=path) as fleet:
        forget_the_names(fleet)
        await fleet.start()
    async with administered(journal=path) as fleet:
        forget_the_names(fleet)
        find(fleet, "ready", "ready")
        assert fleet.states == ["ready", "ready"]


async def test_workers_that_may_sleep_when_they_are_found_are_left_alone_and_say_what_to_do(monkeypatch, autojump_clock):
    lines = []
    monkeypatch.setattr(arrivals_module.log, "warning", lambda event, **fields: lines.append((event, fields)))
    async with administered(lease=100.0) as fleet:
        find(fleet, "paused", "paused", sleep=True)
        await trio.sleep(1000)
        unclear = "it was paused or asleep before headrace was, and doesn't tell which; if its weights are whole, "
        unclear += "POST /workers/w0/wake_up ends either"
        assert (fleet.states, fleet.workers[0].reason) == (["paused", "paused"], unclear)
        assert lines[0] == ("fleet.may_sleep", {"worker": "w0", "end": "POST /workers/w0/wake_up", "why": "no administration.journal"})
        fleet.rig.move(fleet.workers[1], "ready")  # somebody has woken it up, or resumed it, behind headrace's back
        await fleet.pausing.wake_up(fleet.workers[:1], [], by="me")
        assert [(worker.state, worker.reason) for worker in fleet.workers] == [("ready", ""), ("ready", "in a test")]
        await fleet.pause()
        assert fleet.workers[0].reason == "by a trainer"


async def test_the_journal_knows_who_slept(mock_clock, tmp_path):
    path = str(tmp_path / "journal.sqlite")
    async with administered(journal=path) as fleet:
        await fleet.pausing.sleep(fleet.workers, 1, "abort", by="me")
        await fleet.pausing.wake_up(fleet.workers[1:], [], by="me")
        await fleet.pausing.pause(fleet.workers[1:], "keep", clear_cache=False, by="me")
    async with administered(lease=100.0, journal=path) as fleet:
        find(fleet, "paused", "paused", sleep=True)
        await wait_all_tasks_blocked()
        assert fleet.workers[0].reason == "it sleeps"
        mock_clock.jump(1000)
        await wait_all_tasks_blocked()
        assert fleet.states == ["paused", "ready"]


async def test_a_fleet_that_sleeps_is_left_alone(autojump_clock):
    async with administered(lease=100.0) as fleet:
        await fleet.pausing.sleep(fleet.workers, 1, "abort", by="me")
        await trio.sleep(1000)
        assert fleet.states == ["paused", "paused"]
