"""What `/metrics` tells of the fleet's administration, on the virtual clock."""

import trio
from trio.testing import wait_all_tasks_blocked

from core.errors import CallError
from core.fleet.managed import Process
from core.fleet.progress import UpdateRequest
from tests.unit.core.engines import administered
from tests.unit.core.rig import Browser
from tests.unit.core.transports import Courier


async def test_updates_pauses_and_waits_are_counted_and_timed(autojump_clock):
    courier = Courier()
    async with administered(transports=[courier]) as fleet, trio.open_nursery() as nursery:
        metrics, updates = fleet.rig.metrics, fleet.administration.updates
        metrics.watch(fleet.administration)
        courier.stalls["w0"] = trio.Event()
        update = updates.ask(UpdateRequest("8", "courier", {}), fleet.workers, by="me")
        await wait_all_tasks_blocked()
        nursery.start_soon(Browser().ask, fleet.rig)
        await trio.sleep(2)
        courier.stalls["w0"].set()
        await update.done.wait()
        courier.fails["prepare"] = [CallError(504, "no marker")]
        await updates.ask(UpdateRequest("9", "courier", {}), fleet.workers, by="me").done.wait()
        text = metrics.text().decode()
    for line in (
        'headrace_weight_updates_total{outcome="succeeded",transport="courier"} 1.0',
        'headrace_weight_updates_total{outcome="failed",transport="courier"} 1.0',
        'headrace_weight_update_seconds_count{transport="courier"} 2.0',
        "headrace_pause_seconds_count 2.0",
        "headrace_gate_seconds_count 1.0",
        "headrace_gate_seconds_sum 2.0",
        'headrace_policy_version{version="8",worker="w0"} 1.0',
    ):
        assert line in text.splitlines(), line


async def test_a_worker_has_one_version_and_restarts_are_those_of_managed_ones():
    async with administered() as fleet:
        fleet.workers[1].process = Process("w1.log", starts=3)
        for version in ("1", "2"):
            fleet.workers[0].policy_version = version
        lines = [line for line in fleet.rig.metrics.text().decode().splitlines() if not line.startswith("#")]
    assert [line for line in lines if line.startswith("headrace_policy_version") and "w0" in line] == [
        'headrace_policy_version{version="2",worker="w0"} 1.0'
    ]
    assert [line for line in lines if line.startswith("headrace_worker_restarts")] == ['headrace_worker_restarts_total{worker="w1"} 2.0']


async def test_what_hangs_can_be_seen_by_how_long_it_runs(autojump_clock):
    async with administered() as fleet, trio.open_nursery() as nursery:
        fleet.rig.metrics.watch(fleet.administration)

        def running() -> list[str]:
            lines = fleet.rig.metrics.text().decode().splitlines()
            return [line.partition("headrace_")[2] for line in lines if "_running_" in line or "_silent_" in line if line[0] != "#"]

        assert running() == ["weight_update_running_seconds 0.0", "weight_update_silent_seconds 0.0"]
        await fleet.start()
        await trio.sleep(5)
        assert running() == ["weight_update_running_seconds 5.0", "weight_update_silent_seconds 5.0"]
        fleet.engines[0].stalls["update"] = trio.Event()
        nursery.start_soon(fleet.receive)
        await trio.sleep(7)
        assert running() == [
            'operation_running_seconds{operation="update_weights"} 7.0',
            "weight_update_running_seconds 12.0",
            "weight_update_silent_seconds 0.0",
        ]
        fleet.engines[0].stalls["update"].set()
