"""Prime-RL's control plane, in the bodies that its versions send, on workers of different sizes."""

from types import SimpleNamespace
from typing import Any, cast

import httpx
import msgspec
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from core.northbound.administration import add_administration_routes
from core.proxy import Proxy
from core.registry import Loaded, Registry
from core.routes import Routes
from plugins.prime_rl import PrimeRL, Settings
from tests.unit.core.engines import administered, serve_http
from tests.unit.core.test_routes import ask

NCCL = {
    "host": "trainer",
    "port": 29501,
    "rank_offset": 0,
    "inference_world_size": 4,
    "timeout": 1200,
    "quantize_in_weight_transfer": False,
}
NIXL = {**NCCL, "port": 8001, "session_id": "run-1"}
DYNAMO = {**NCCL, "engine_world_size": 4}
NO_METHOD = httpx.Response(500, json={"error": "'Worker' object has no attribute 'init_broadcaster'"})


class Fleet:
    """Workers of one and of three ranks behind the plugin; `sent` are the bodies that each got."""

    def __init__(self, fleet, **settings):
        plugin = PrimeRL(Settings(**settings))
        self.workers = fleet.workers
        self.sent: list[list[Any]] = [serve_http(worker, {"results": [None] * worker.world_size}) for worker in fleet.workers]
        self._routes = Routes(max_body_bytes=10_000)
        add_administration_routes(self._routes, fleet.administration, Registry([Loaded("prime-rl", plugin)]))
        plugin.register_routes(self._routes, cast("Proxy", SimpleNamespace(administration=fleet.administration)))

    async def post(self, path, body):
        return await ask(self._routes, "POST", path, msgspec.json.encode(body))

    async def refused(self, path, body):
        browser = await self.post(path, body)
        return browser.status, browser.json["error"]["message"]


# --- init_broadcaster ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [NCCL, NIXL, DYNAMO])
async def test_each_worker_joins_at_its_place(body):
    async with administered(1, 3) as administration:
        fleet = Fleet(administration)
        browser = await fleet.post("/init_broadcaster", body)
        assert (browser.status, browser.json) == (200, {"status": "ok"})
        expected = [{**body, "rank_offset": 0}, {**body, "rank_offset": 1}]
        for kwargs, ranks in zip(expected, (1, 3), strict=True):
            kwargs |= {"engine_world_size": ranks} if "engine_world_size" in kwargs else {}
        assert [rpc["kwargs"] for [rpc] in fleet.sent] == expected
        assert [rpc["method"] for [rpc] in fleet.sent] == ["init_broadcaster"] * 2


@pytest.mark.parametrize("args", [["trainer", 29501, 0, 4, 1200, False, "default"], ["trainer", 29501, 0, 4]])
async def test_arguments_without_names_are_numbered_by_their_places(args):
    async with administered(1, 3) as administration:
        fleet = Fleet(administration)
        browser = await fleet.post("/collective_rpc", {"method": "init_broadcaster", "timeout": 1200, "args": args, "kwargs": {}})
        assert browser.json == {"results": [None] * 4}
        assert [rpc["args"] for [rpc] in fleet.sent] == [args, [*args[:2], 1, *args[3:]]]


async def test_named_arguments_of_a_collective_rpc_are_numbered():
    async with administered(1, 3) as administration:
        fleet = Fleet(administration)
        await fleet.post("/collective_rpc", {"method": "init_broadcaster", "kwargs": DYNAMO})
        places = [(rpc["kwargs"]["rank_offset"], rpc["kwargs"]["engine_world_size"]) for [rpc] in fleet.sent]
        assert places == [(0, 1), (1, 3)]


async def test_arguments_that_count_nobody_go_to_all_as_they_are():
    async with administered(1, 3) as administration:
        fleet = Fleet(administration)
        assert (await fleet.post("/init_broadcaster", {"host": "trainer", "port": 1})).status == 200
        assert [rpc["kwargs"] for [rpc] in fleet.sent] == [{"host": "trainer", "port": 1}] * 2


async def test_who_speaks_to_a_worker_alone_numbers_it():
    async with administered(1, 3) as administration:
        fleet = Fleet(administration)
        body = {**NCCL, "rank_offset": 7, "inference_world_size": 99}
        assert (await fleet.post("/workers/w1/init_broadcaster", body)).status == 200
        assert (await fleet.post("/workers/w1/collective_rpc", {"method": "init_broadcaster", "kwargs": body})).status == 200
        assert fleet.sent == [[], [{"method": "init_broadcaster", "kwargs": body}] * 2]


async def test_a_named_cohort_is_a_fleet_of_its_own():
    async with administered(1, 3, 2) as administration:
        administration.administration.select_cohort("mine", "tiny", ["w1", "w2"], substitution=False, by="me")
        fleet = Fleet(administration)
        assert (await fleet.post("/cohorts/mine/init_broadcaster", {**NCCL, "inference_world_size": 5})).status == 200
        assert (await fleet.post("/cohorts/mine/update_weights", {"weight_dir": None})).status == 200
        assert [len(bodies) for bodies in fleet.sent] == [0, 2, 2]
        assert [bodies[0]["kwargs"]["rank_offset"] for bodies in fleet.sent[1:]] == [0, 3]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"inference_world_size": 2},
            "inference_world_size: the trainer counts 2 ranks, and the fleet has 4 (w0 1, w1 3): some would wait for others for ever",
        ),
        ({"inference_world_size": None}, "inference_world_size: Expected `int`, got `null`"),
        ({"rank_offset": 1}, "rank_offset: it is 0 for the whole fleet, and not 1; who numbers the workers speaks to each (/workers/<id>)"),
        ({"tiemout": 1}, "tiemout: there is no such key here; did you mean 'timeout'?"),
        ({"port": "1"}, "port: Expected `int`, got `str`"),
    ],
)
async def test_a_group_with_a_hole_is_refused_before_a_worker_hears_of_it(change, message):
    async with administered(1, 3) as administration:
        fleet = Fleet(administration)
        assert await fleet.refused("/init_broadcaster", {**NCCL, **change}) == (400, message)
        assert fleet.sent == [[], []]


async def test_the_workers_join_at_the_same_time_and_calls_wait_meanwhile():
    async with administered(1, 3) as administration:
        fleet, everybody = Fleet(administration), trio.Event()
        seen = []

        async def arrive(request):
            seen.append(msgspec.json.decode(request.content)["kwargs"]["rank_offset"])
            if len(seen) == 2:
                everybody.set()
            await everybody.wait()
            return httpx.Response(200, json={"results": [None]})

        for worker in fleet.workers:
            worker.http = httpx.AsyncClient(base_url="http://w", transport=httpx.MockTransport(arrive))
        with trio.fail_after(5):
            assert (await fleet.post("/init_broadcaster", NCCL)).status == 200
        assert sorted(seen) == [0, 1]


async def test_who_posts_again_joins_what_runs(autojump_clock):
    async with administered(1, 3) as administration:
        fleet, trainer = Fleet(administration), trio.Event()
        arrived = []

        async def wait(request):
            arrived.append(request)
            await trainer.wait()
            return httpx.Response(200, json={"results": [None]})

        for worker in fleet.workers:
            worker.http = httpx.AsyncClient(base_url="http://w", transport=httpx.MockTransport(wait))
        with trio.move_on_after(720):
            await fleet.post("/init_broadcaster", NCCL)
        assert [worker.reason for worker in fleet.workers] == ["it joins a trainer's group"] * 2
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fleet.post, "/init_broadcaster", NCCL)
            await wait_all_tasks_blocked()
            trainer.set()
        assert len(arrived) == 2


async def test_engines_without_the_method_are_a_404_which_prime_rl_takes_for_does_without():
    async with administered(1, 3) as administration:
        fleet = Fleet(administration)
        for worker in fleet.workers:
            serve_http(worker, lambda _: NO_METHOD)
        status, _ = await fleet.refused("/init_broadcaster", NCCL)
        assert status == 404
        fleet = Fleet(administration)
        assert (await fleet.post("/update_weights", {"weight_dir": None})).status == 200


async def test_engines_without_the_method_end_what_is_remembered_of_a_wrong_count():
    async with administered(1, 3) as administration:
        fleet = Fleet(administration)
        await fleet.refused("/init_broadcaster", {**NCCL, "inference_world_size": 2})
        for worker in fleet.workers:
            serve_http(worker, lambda _: NO_METHOD)
        assert (await fleet.refused("/init_broadcaster", NCCL))[0] == 404
        for worker in fleet.workers:
            serve_http(worker, {"results": [None] * worker.world_size})
        assert (await fleet.post("/update_weights", {"weight_dir": None})).status == 200


async def test_a_joining_that_failed_is_told_again_where_prime_rl_looks():
    async with administered(1, 3) as administration:
        fleet = Fleet(administration)
        assert (await fleet.refused("/init_broadcaster", {**NCCL, "inference_world_size": 2}))[0] == 400
        status, told = await fleet.refused("/update_weights", {"weight_dir": None})
        assert status == 409
        assert told.startswith("the trainer's group is incomplete: /init_broadcaster has failed: inference_world_size: the trainer ")
        assert fleet.sent == [[], []]
        assert (await fleet.post("/update_weights", {"weight_dir": "/out/step_1"})).status == 200, "another trainer, that needs no group"


async def test_the_latest_joining_that_failed_is_the_one_that_is_told():
    async with administered(1, 3) as administration:
        fleet = Fleet(administration)
        await fleet.refused("/init_broadcaster", {**NCCL, "inference_world_size": 2})
        await fleet.refused("/workers/w0/init_broadcaster", {**NCCL, "port": "none"})
        await fleet.refused("/init_broadcaster", {**NCCL, "inference_world_size": 9})
        _, told = await fleet.refused("/update_weights", {"weight_dir": None})
        assert "the trainer counts 9 ranks" in told
        assert (await fleet.post("/init_broadcaster", NCCL)).status == 200
        assert (await fleet.post("/update_weights", {"weight_dir": None})).status == 200


async def test_a_joining_that_failed_on_some_workers_is_nothing_to_another_trainer_with_others():
    async with administered(1, 3, 2) as administration:
        administration.administration.select_cohort("left", "tiny", ["w0"], substitution=False, by="me")
        administration.administration.select_cohort("right", "tiny", ["w1", "w2"], substitution=False, by="me")
        fleet = Fleet(administration)
        assert (await fleet.refused("/cohorts/left/init_broadcaster", NCCL))[0] == 400
        assert (await fleet.post("/cohorts/right/update_weights", {"weight_dir": "/out/step_1"})).status == 200
        status, told = await fleet.refused("/cohorts/left/update_weights", {"weight_dir": None})
        assert (status, told.startswith("the trainer's group is incomplete: /cohorts/left/init_broadcaster has failed: ")) == (409, True)


async def test_a_joining_that_failed_on_all_is_mended_by_one_on_each():
    async with administered(1, 3) as administration:
        fleet = Fleet(administration)
        await fleet.refused("/init_broadcaster", {**NCCL, "inference_world_size": 2})
        for worker in fleet.workers:
            assert (await fleet.post(f"/workers/{worker.id}/init_broadcaster", NCCL)).status == 200
        assert (await fleet.post("/workers/w0/update_weights", {"weight_dir": None})).status == 200


async def test_a_method_that_only_some_engines_have_is_no_404():
    async with administered(1, 3) as administration:
        fleet = Fleet(administration)
        serve_http(fleet.workers[1], lambda _: NO_METHOD)
        status, message = await fleet.refused("/init_broadcaster", NCCL)
        assert (status, "w1: 'Worker' object has no attribute" in message) == (500, True)
        assert (await fleet.refused("/update_weights", {"weight_dir": None}))[0] == 409


async def test_a_joining_that_is_mended_is_forgotten():
    async with administered(1, 3) as administration:
        fleet = Fleet(administration)
        await fleet.refused("/init_broadcaster", {**NCCL, "inference_world_size": 2})
        assert (await fleet.post("/init_broadcaster", NCCL)).status == 200
        assert (await fleet.post("/update_weights", {"weight_dir": None})).status == 200


# --- update_weights -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("folder", "version"),
    [("/out/broadcasts/step_12", "12"), ("/out/step_0/", "0"), ("/out/latest", "default"), ("/out/step_x", "default"), (None, "default")],
)
async def test_the_folder_is_the_one_argument_and_its_step_the_label(folder, version):
    async with administered(1, 3) as administration:
        fleet = Fleet(administration)
        browser = await fleet.post("/update_weights", {"weight_dir": folder})
        assert (browser.status, browser.json) == (200, {"status": "ok"})
        assert fleet.sent == [[{"method": "update_weights_from_path", "args": [folder]}]] * 2
        assert [engine.version for engine in administration.engines] == [version] * 2


async def test_labels_can_be_left_alone():
    async with administered(1, 3) as administration:
        fleet = Fleet(administration, label_weights=False)
        assert (await fleet.post("/update_weights", {"weight_dir": "/out/step_12", "version_uid": None})).status == 200
        assert [engine.version for engine in administration.engines] == ["default"] * 2


async def test_one_worker_is_updated_alone():
    async with administered(1, 3) as administration:
        fleet = Fleet(administration)
        assert (await fleet.post("/workers/w1/update_weights", {"weight_dir": "/out/step_1"})).status == 200
        assert [len(bodies) for bodies in fleet.sent] == [0, 1]


async def test_vllms_own_body_goes_its_own_way():
    async with administered(1, 3) as administration:
        fleet = Fleet(administration)
        assert await fleet.refused("/update_weights", {"update_info": {"names": []}}) == (
            409,
            "update_weights: no weight update is running: start one first (/start_weight_update)",
        )


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"weight_dir": 7}, "weight_dir: Expected `str | null`, got `int`"),
        ({"weight_dir": " "}, "weight_dir: it is the path of a folder, or null"),
        ({"weight_dir": "/a", "version_uid": "x"}, "version_uid: Expected `null`, got `str`"),
        ({"weight_dir": "/a", "step": 1}, "step: there is no such key here; known are version_uid, weight_dir"),
        ({"weights": "/a"}, "weights: there is no such key here; known are update_info"),
    ],
)
async def test_what_is_wrong_in_an_update_is_refused_by_name(body, message):
    async with administered(1, 3) as administration:
        fleet = Fleet(administration)
        assert await fleet.refused("/update_weights", body) == (400, message)
        assert fleet.sent == [[], []]


async def test_2xx_means_every_worker_and_a_retry_heals_what_failed_on_one():
    async with administered(1, 3) as administration:
        fleet = Fleet(administration)
        serve_http(
            fleet.workers[1],
            lambda count: httpx.Response(500, json={"error": "stale"}) if count == 1 else httpx.Response(200, json={"results": [None] * 3}),
        )
        status, message = await fleet.refused("/update_weights", {"weight_dir": "/out/step_1"})
        assert (status, "w1: stale" in message) == (500, True)
        assert administration.states == ["ready", "quarantined"]
        assert (await fleet.post("/update_weights", {"weight_dir": "/out/step_1"})).status == 200
        assert administration.states == ["ready", "ready"]


async def test_a_fleet_that_has_changed_since_it_joined_is_refused_and_not_hung():
    async with administered(1, 3) as administration:
        fleet = Fleet(administration)
        await fleet.post("/init_broadcaster", NCCL)
        fleet.workers[1].info = msgspec.structs.replace(fleet.workers[1].info, instance_id="2")
        status, message = await fleet.refused("/update_weights", {"weight_dir": None})
        assert (status, "the trainer's group has changed: w1 was replaced by another process" in message) == (409, True)
