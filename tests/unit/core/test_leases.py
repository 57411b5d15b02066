"""Pauses whose trainer has fallen silent; on the virtual clock."""

import trio
from trio.testing import wait_all_tasks_blocked

from core.fleet import administration as administration_module
from tests.unit.core.engines import administered


async def test_a_pause_whose_trainer_is_silent_ends_loudly(monkeypatch, autojump_clock):
    lines = []
    monkeypatch.setattr(administration_module.log, "error", lambda event, **fields: lines.append((event, fields)))
    async with administered(lease=100.0) as fleet:
        await fleet.pause()
        await trio.sleep(99)
        assert fleet.states == ["paused", "paused"]
        await trio.sleep(2)
        assert fleet.states == ["ready", "ready"]
        assert lines == [("fleet.lease_ended", {"workers": ["w0", "w1"], "seconds": 100.0})]
        assert fleet.journal == [("pause", "ok"), ("lease_ended", "ok")]


async def test_a_pause_that_waits_for_calls_ends_with_the_lease_once_its_client_has_gone(autojump_clock):
    async with administered(lease=100.0) as fleet:
        fleet.engines[0].stalls["pause"] = trio.Event()
        with trio.move_on_after(500):
            await fleet.pause(mode="wait")
        await trio.sleep(99)
        assert fleet.states == ["paused", "paused"]
        await trio.sleep(2)
        assert (fleet.states, fleet.engines[1].paused) == (["ready", "ready"], False)
        assert fleet.journal == [
            ("pause", "pause: ended before all calls had: its trainer was silent for 100 s"),
            ("lease_ended", "ok"),
        ]


async def test_who_asks_again_for_a_pause_that_waits_is_waited_with(autojump_clock):
    async with administered(lease=100.0) as fleet, trio.open_nursery() as nursery:
        fleet.engines[0].stalls["pause"] = trio.Event()
        with trio.move_on_after(50):
            await fleet.pause(mode="wait")
        nursery.start_soon(lambda: fleet.pause(mode="wait"))
        await trio.sleep(500)
        fleet.engines[0].stalls["pause"].set()
        await wait_all_tasks_blocked()
        assert (fleet.states, fleet.engines[0].asked) == (["paused", "paused"], ["pause"])


async def test_a_trainer_that_asks_for_something_is_not_silent(autojump_clock):
    async with administered(lease=100.0) as fleet:
        await fleet.pause()
        for _ in range(5):
            await trio.sleep(90)
            fleet.administration.workers()
        assert fleet.states == ["paused", "paused"]


async def test_an_operation_that_runs_is_nobodys_silence(autojump_clock):
    async with administered(lease=100.0) as fleet, trio.open_nursery() as nursery:
        await fleet.pause()
        await fleet.start()
        fleet.engines[0].stalls["update"] = trio.Event()
        nursery.start_soon(fleet.receive)
        await trio.sleep(500)
        assert fleet.states == ["updating", "updating"]
        fleet.engines[0].stalls["update"].set()
        await wait_all_tasks_blocked()
        await fleet.finish()
