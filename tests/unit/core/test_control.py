"""The administration of one worker over each wire: the stand-in and vllm-rs over real sockets, and answers that are none."""

from contextlib import asynccontextmanager

import httpx
import pytest

from core.fleet.connection import connect
from core.fleet.control import ControlFailed, WorkerControl
from core.fleet.worker import Worker
from core.settings import WorkerSettings
from tests.unit.core.rig import make_worker

INIT = {"master_address": "h", "master_port": 1, "rank_offset": 1, "world_size": 2}
UPDATE = {"names": ["w"], "dtype_names": ["float32"], "shapes": [[1]]}


@asynccontextmanager
async def controlling(running, wires):
    settings = WorkerSettings(grpc=running.grpc if "grpc" in wires else None, http=running.http if "http" in wires else None, id="w")
    async with connect(settings) as connection:
        worker = Worker(settings)
        worker.control, worker.http = connection.control, connection.http
        yield WorkerControl(worker)


async def go_through_everything(running, wires):
    async with controlling(running, wires) as control:
        await control.pause("keep", clear_cache=False)
        assert await control.is_paused()
        assert await control.is_sleeping()  # as vLLM has it
        await control.init_weight_transfer(INIT)
        await control.start_weight_update()
        await control.update_weights(UPDATE)
        await control.finish_weight_update("8")
        assert await control.policy_version() == "8"
        await control.set_policy_version("default")
        assert await control.policy_version() == "default"
        await control.resume()
        assert not await control.is_paused()
        await control.sleep(1, "abort")
        assert await control.is_sleeping()
        await control.wake_up(["weights"])
        assert await control.is_sleeping()
        await control.wake_up([])
        assert not await control.is_sleeping()
        await control.abort(["nobody"])
        with pytest.raises(ControlFailed, match="worker 'w': finish_weight_update: ") as failed:
            await control.finish_weight_update(None)
        assert (failed.value.status, failed.value.operation) == (500, "finish_weight_update")
        if "http" in wires:
            assert await control.reset_prefix_cache()
            assert await control.collective_rpc({"method": "reload_weights"}) == [None]
            await control.start_weight_update()
            await control.update_weights([UPDATE])
            await control.finish_weight_update(None)
            await control.collective_rpc({"method": "reload_weights"})
        else:
            with pytest.raises(ControlFailed, match="the settings name none") as failed:
                await control.collective_rpc({"method": "reload_weights"})
            assert failed.value.status == 501
        assert control.worker.administrations == 0


@pytest.mark.parametrize("wires", [("grpc",), ("http",), ("grpc", "http")])
async def test_the_stand_in_is_administered_over_each_wire(stand_in_worker, wires):
    await go_through_everything(stand_in_worker, wires)


@pytest.mark.parametrize("wires", [("grpc",), ("http",), ("grpc", "http")])
async def test_vllm_is_administered_over_each_wire(scripted_worker, wires):
    await go_through_everything(scripted_worker, wires)


async def test_vllm_tells_of_its_configuration(scripted_worker):
    async with controlling(scripted_worker, ("http",)) as control:
        assert await control.server_info({"config_format": "json"})


def over_http(answer):
    worker = make_worker("w")
    worker.http = httpx.AsyncClient(base_url="http://w", transport=httpx.MockTransport(answer))
    return WorkerControl(worker)


async def test_an_empty_list_of_calls_ends_none():
    asked = []
    control = over_http(lambda request: asked.append(request) or httpx.Response(200))
    await control.abort([])
    assert asked == []  # vLLM would end all of them


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(200),
        httpx.Response(200, text="<html>"),
        httpx.Response(200, json=[]),
        httpx.Response(200, json={"results": 7}),
        httpx.Response(200, json={"other": []}),
    ],
)
async def test_an_answer_that_is_none_is_a_502(answer):
    with pytest.raises(ControlFailed) as failed:
        await over_http(lambda _: answer).collective_rpc({"method": "m"})
    assert failed.value.status == 502
    assert "worker 'w'" in failed.value.message


async def test_a_server_without_development_routes_is_told_how_to_be_started():
    with pytest.raises(ControlFailed, match="VLLM_SERVER_DEV_MODE=1") as failed:
        await over_http(lambda _: httpx.Response(404)).resume()
    assert failed.value.status == 501


async def test_a_worker_that_cannot_be_reached_is_probed():
    def gone(_):
        raise httpx.ConnectError("refused")

    control = over_http(gone)
    with pytest.raises(ControlFailed, match="can't be reached: refused") as failed:
        await control.resume()
    assert failed.value.status == 503
    await control.worker.suspected()


async def test_a_server_that_wants_another_key_is_no_fault_of_who_asked():
    with pytest.raises(ControlFailed, match=r"wants an API key \(401\): let api_key_env name") as failed:
        await over_http(lambda _: httpx.Response(401, json={"error": "Unauthorized"})).resume()
    assert failed.value.status == 502
