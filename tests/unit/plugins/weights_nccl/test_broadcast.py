"""The transport `broadcast` as the core uses it: what it takes of a request, and what the workers are asked."""

from typing import Any

import httpx
import pytest
import trio
from msgspec.structs import replace
from trio.testing import wait_all_tasks_blocked

from core import BadRequest
from core.fleet.progress import Update, UpdateRequest
from plugins.weights_nccl.broadcast import BroadcastTransport
from tests.unit.core.engines import AdministeredFleet, administered, serve_http

OPTIONS: dict[str, Any] = {"host": "10.0.0.1", "port": 29500, "number": 3}
METHOD = "receive_broadcast"


def ask(fleet: AdministeredFleet) -> Update:
    return fleet.administration.updates.ask(UpdateRequest("7", "broadcast", OPTIONS), fleet.administration.workers(), by="me")


def failing(reason: str) -> Any:
    error = {"error": {"message": f"failed to call collective_rpc: {reason}", "type": "server_error", "param": None, "code": 500}}
    return lambda _: httpx.Response(500, json=error)


async def test_each_worker_is_told_its_place_behind_the_trainer_and_all_are_asked_at_once():
    async with administered(2, 1, transports=[BroadcastTransport()]) as fleet:
        all_asked = trio.Event()
        asked = [serve_http(worker, {"results": [None] * worker.world_size}) for worker in fleet.workers]
        for worker in fleet.workers:
            assert worker.http
            send = worker.http.request

            async def request(*arguments: Any, send=send, **options: Any) -> httpx.Response:
                response = await send(*arguments, **options)
                if all(asked):
                    all_asked.set()
                await all_asked.wait()
                return response

            worker.http.request = request
        update = ask(fleet)
        await update.done.wait()
    told = {**OPTIONS, "timeout": 1800.0, "stall": 300.0, "world_size": 4}
    assert asked == [[{"method": METHOD, "kwargs": {**told, "rank_offset": offset}}] for offset in (1, 3)]
    assert update.failure is None
    assert [engine.version for engine in fleet.engines] == ["7", "7"]


async def test_the_parts_of_one_data_parallel_group_are_told_the_same():
    async with administered(1, 1, 1, transports=[BroadcastTransport()]) as fleet:
        for rank, worker in enumerate(fleet.workers[1:]):
            assert worker.info
            worker.info = replace(worker.info, ranks=(rank,), data_parallel_size=2)
        asked = [serve_http(worker, {"results": [None]}) for worker in fleet.workers]
        await ask(fleet).done.wait()
    assert [bodies[0]["kwargs"]["rank_offset"] for bodies in asked] == [1, 2, 2]


async def test_a_worker_without_the_extension_is_told_of_it_and_nothing_has_changed():
    async with administered(transports=[BroadcastTransport()]) as fleet:
        serve_http(fleet.workers[0], failing("'CPUWorker' object has no attribute 'receive_broadcast'"))
        serve_http(fleet.workers[1], failing("the trainer called it off. This rank has the weights that it had"))
        update = ask(fleet)
        await update.done.wait()
        wanted = "w0: it has no receive_broadcast: start its engine with --worker-extension-cls plugins.weights_nccl.worker.Broadcast"
        assert wanted in str(update.failure)
        assert "Nothing has changed" in str(update.failure)
        assert fleet.states == ["ready", "ready"]


async def test_who_broke_off_in_the_middle_is_quarantined_and_who_had_not_begun_goes_on():
    async with administered(transports=[BroadcastTransport()]) as fleet:
        serve_http(fleet.workers[0], failing("after 3 of 8 messages: a rank has gone. The weights are a mixture now"))
        serve_http(fleet.workers[1], failing("the trainer called it off. This rank has the weights that it had"))
        await ask(fleet).done.wait()
        assert fleet.states == ["quarantined", "ready"]


async def test_who_is_awaited_is_told(autojump_clock):
    async with administered(transports=[BroadcastTransport()], stuck_after=10.0) as fleet:
        come = trio.Event()
        for worker in fleet.workers:
            serve_http(worker, {"results": [None]})
        http = fleet.workers[1].http
        assert http
        send = http.request

        async def request(*arguments: Any, **options: Any) -> httpx.Response:
            await come.wait()
            return await send(*arguments, **options)

        http.request = request
        update = ask(fleet)
        await trio.sleep(15)
        await wait_all_tasks_blocked()
        [operation] = fleet.administration.describe()
        assert operation["missing"] == ["w1"]
        assert [worker["status"] for worker in update.describe()["workers"].values()] == ["applying", "applying"]
        come.set()
        await update.done.wait()
        assert update.failure is None


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"host": ""}, "host"),
        ({"host": "a b"}, "host"),
        ({"port": 0}, "port"),
        ({"port": 65536}, "port"),
        ({"port": "29500"}, "port"),
        ({"number": 0}, "number"),
        ({"stall": 0}, "stall"),
        ({"timeout": -1}, "timeout"),
        ({"path": "/weights"}, "path"),
    ],
)
def test_what_is_wrong_is_refused_by_name(change: dict[str, Any], param: str | None):
    with pytest.raises(BadRequest) as refused:
        BroadcastTransport().parse({**OPTIONS, **change})
    assert refused.value.param == param


@pytest.mark.parametrize("key", OPTIONS)
def test_the_trainer_has_to_say_where_and_when(key: str):
    with pytest.raises(BadRequest, match=f"{key}: this field is required"):
        BroadcastTransport().parse({name: value for name, value in OPTIONS.items() if name != key})
