"""Methods of the workers by `/collective_rpc`; one that replaces the weights is an update in itself."""

from functools import partial

import httpx
import pytest

from core.errors import CallError
from core.fleet.operations import FleetFailed
from tests.unit.core.engines import administered, broken, serve_http

ALL = ["start", "update", "finish"]


async def test_results_come_in_the_order_of_the_ranks():
    async with administered(1, 2) as fleet:
        serve_http(fleet.workers[0], {"results": ["a"]})
        serve_http(fleet.workers[1], {"results": ["b", None]})
        assert await fleet.methods.call(fleet.workers, {"method": "m"}, by="me") == ["a", "b", None]
        assert fleet.states == ["ready", "ready"]


@pytest.mark.parametrize(("good", "others"), [([], ""), (["w1"], " The other workers did it")])
async def test_what_the_others_did_is_told_only_where_there_are_others(good, others):
    async with administered(1, *(1 for _ in good)) as fleet:
        serve_http(fleet.workers[0], lambda _: httpx.Response(404, json={"error": "no such method"}))
        for worker in fleet.workers[1:]:
            serve_http(worker, {"results": [None]})
        with pytest.raises(FleetFailed) as failed:
            await fleet.methods.call(fleet.workers, {"method": "nope"}, by="me")
        assert failed.value.message == f"collective_rpc nope failed on w0: no such method.{others}"


async def test_a_method_that_replaces_the_weights_is_an_update():
    async with administered() as fleet:
        serve_http(fleet.workers[0], {"results": [None]})
        serve_http(
            fleet.workers[1],
            lambda count: (
                httpx.Response(500, json={"error": "no such file"}) if count == 1 else httpx.Response(200, json={"results": [None]})
            ),
        )
        reload = partial(fleet.methods.call, fleet.workers, {"method": "reload_weights"}, by="me")
        await fleet.pause()
        with pytest.raises(FleetFailed, match="w1: no such file"):
            await reload()
        await fleet.resume()
        assert fleet.states == ["ready", "quarantined"]
        await reload()  # the trainer has let go of both
        assert fleet.states == ["ready", "ready"]


async def test_a_method_that_replaces_the_weights_is_refused_while_an_update_by_steps_is_open():
    async with administered(1) as fleet:
        bodies = serve_http(fleet.workers[0], {"results": [None]})
        await fleet.start()
        with pytest.raises(CallError, match="collective_rpc reload_weights: me has started a weight update on w0") as refused:
            await fleet.methods.call(fleet.workers, {"method": "reload_weights"}, by="somebody")
        assert (refused.value.status, bodies) == (409, [])
        assert await fleet.methods.call(fleet.workers, {"method": "get_rank"}, by="somebody") == [None]
        await fleet.receive()
        await fleet.finish("8")
        assert fleet.states == ["ready"]


async def test_a_worker_that_failed_in_an_update_which_paused_it_goes_on_when_a_checkpoint_has_mended_it():
    async with administered() as fleet:
        serve_http(fleet.workers[0], {"results": [None]})
        await fleet.start()
        fleet.engines[0].fails["update"] = [broken()]
        with pytest.raises(FleetFailed):
            await fleet.receive()
        await fleet.finish()
        assert fleet.states == ["quarantined", "ready"]
        fleet.engines[0].broken = False
        await fleet.methods.call(fleet.workers[:1], {"method": "reload_weights"}, by="me")
        assert (fleet.states, fleet.engines[0].paused) == (["ready", "ready"], False)


async def test_a_method_that_nobody_has_quarantines_nobody():
    async with administered() as fleet:
        for worker in fleet.workers:
            serve_http(worker, lambda _: httpx.Response(500, json={"error": "'Worker' object has no attribute 'update_weights_from_path'"}))
        with pytest.raises(FleetFailed) as failed:
            await fleet.methods.call(fleet.workers, {"method": "update_weights_from_path"}, by="me")
        assert failed.value.status == 404
        assert fleet.states == ["ready", "ready"]


async def test_a_label_follows_the_weights_of_each_worker():
    async with administered() as fleet:
        serve_http(fleet.workers[0], {"results": [None]})
        serve_http(fleet.workers[1], lambda _: httpx.Response(500, json={"error": "disk full"}))
        with pytest.raises(FleetFailed, match="w1: disk full"):
            await fleet.methods.call(fleet.workers, {"method": "reload_weights"}, by="me", version="7")
        assert [(engine.version, worker.policy_version) for engine, worker in zip(fleet.engines, fleet.workers, strict=True)] == [
            ("7", "7"),
            ("default", None),
        ]
