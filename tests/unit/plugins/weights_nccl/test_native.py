"""The transport `nccl` as the core uses it: vLLM's own steps, in their order, with what the trainer says passed through."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from core import BadRequest
from core.fleet.progress import Update, UpdateRequest
from plugins.weights_nccl.native import NativeTransport
from tests.unit.core.engines import INIT, UPDATE, AdministeredFleet, administered, broken, serve_http

SPARSE = {**UPDATE, "num_updates_list": [3]}
ALL_STEPS = ["pause", "start", "update", "finish", "label", "resume"]


def ask(fleet: AdministeredFleet, **options: Any) -> Update:
    return fleet.administration.updates.ask(UpdateRequest("7", "nccl", options), fleet.administration.workers(), by="me")


@asynccontextmanager
async def joined(*world_sizes: int) -> AsyncIterator[AdministeredFleet]:
    """A fleet in a trainer's group."""
    async with administered(*world_sizes, transports=[NativeTransport()]) as fleet:
        await fleet.joining.join(fleet.workers, lambda cohort, index: INIT, by="me")
        for engine in fleet.engines:
            engine.asked.clear()
        yield fleet


async def test_without_a_trainers_group_nobody_is_asked_to_start():
    async with administered(transports=[NativeTransport()]) as fleet:
        update = ask(fleet, update_info=UPDATE)
        await update.done.wait()
        assert update.failure
        assert (update.failure.status, fleet.states) == (409, ["ready", "ready"])
        assert [engine.asked for engine in fleet.engines] == [[], []]


async def test_every_worker_takes_vllms_steps():
    async with joined(1, 3) as fleet:
        update = ask(fleet, update_info=SPARSE)
        await update.done.wait()
        assert update.failure is None
        assert [engine.asked for engine in fleet.engines] == [ALL_STEPS] * 2
        assert [(engine.sent["update"], engine.sent["finish"]) for engine in fleet.engines] == [(SPARSE, "7")] * 2


async def test_chunks_come_one_after_the_other():
    async with joined(1) as fleet:
        chunks = [{**UPDATE, "names": [name]} for name in "abc"]
        update = ask(fleet, chunks=chunks)
        await update.done.wait()
        [engine] = fleet.engines
        assert update.failure is None
        assert engine.asked == ["pause", "start", "update", "update", "update", "finish", "label", "resume"]
        assert engine.sent["update"] == chunks[-1]


async def test_a_list_has_an_element_for_each_rank_and_each_worker_gets_its_own():
    async with joined(1, 2) as fleet:
        asked = [serve_http(worker, {"message": "Weights updated"}) for worker in fleet.workers]
        update = ask(fleet, update_info=[{"of": rank} for rank in range(3)])
        await update.done.wait()
    assert asked == [[{"update_info": [{"of": 0}]}], [{"update_info": [{"of": 1}, {"of": 2}]}]]


async def test_a_list_of_another_length_is_refused_before_anybody_is_paused():
    async with joined(1, 2) as fleet:
        update = ask(fleet, chunks=[UPDATE, [{"of": 0}]])
        await update.done.wait()
        assert str(update.failure) == "update_info: 1 objects for 3 ranks; as a list it has one for each"
        assert [engine.asked for engine in fleet.engines] == [[], []]


async def test_all_are_in_their_update_at_the_same_time():
    async with joined() as fleet:
        come = trio.Event()
        for engine in fleet.engines:
            engine.stalls["update"] = come
        update = ask(fleet, update_info=UPDATE)
        await wait_all_tasks_blocked()
        assert [engine.asked[-1] for engine in fleet.engines] == ["update", "update"]
        [operation] = fleet.administration.describe()
        assert operation["missing"] == ["w0", "w1"]
        come.set()
        await update.done.wait()
        assert update.failure is None


async def test_who_fails_in_the_middle_is_quarantined_and_its_rest_cleared_away_before_a_whole_update():
    async with joined() as fleet:
        fleet.engines[1].fails["update"] = [broken("NCCL error")]
        update = ask(fleet, update_info=UPDATE)
        await update.done.wait()
        assert str(update.failure) == "update failed on w1: NCCL error. Quarantined; the other workers go on"
        assert fleet.states == ["ready", "quarantined"]
        for engine in fleet.engines:
            engine.asked.clear()
        await ask(fleet, update_info=UPDATE).done.wait()
        assert fleet.states == ["ready", "ready"]
        whole = ["start", "update", "finish", "label", "resume"]
        assert [engine.asked[-7:] for engine in fleet.engines] == [["pause", *whole], ["start", "finish", *whole]]
        await ask(fleet, update_info=UPDATE).done.wait()
        assert fleet.engines[1].asked[-6:] == ["pause", *whole]


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({}, "update_info"),
        ({"update_info": UPDATE, "chunks": [UPDATE]}, "update_info"),
        ({"update_info": "all"}, "update_info"),
        ({"chunks": []}, "chunks"),
        ({"chunks": [7]}, "chunks[0]"),
        ({"update_info": UPDATE, "packed": True}, "packed"),
    ],
)
def test_what_is_wrong_is_refused_by_name(options: dict[str, Any], param: str | None):
    with pytest.raises(BadRequest) as refused:
        NativeTransport().parse(options)
    assert refused.value.param == param
