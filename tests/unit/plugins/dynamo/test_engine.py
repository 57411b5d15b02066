"""The operations: what they ask of the workers, what they answer, and how they say that something is wrong."""

import pytest
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from msgspec.structs import replace

from core.errors import BadRequest, NotFound
from core.wire.generated.vllm import PauseMode
from tests.unit.core.engines import INIT, UPDATE, broken
from tests.unit.plugins.dynamo.fleet import dynamo

STEPS = [
    ("control/pause_generation", {"mode": "keep", "clear_cache": False}, {"status": "paused"}),
    ("control/is_paused", {}, {"is_paused": True}),
    ("update/init_weight_transfer_engine", {"init_info": {**INIT, "world_size": 5}}, {"message": "Weight transfer initialized"}),
    ("update/start_weight_update", {}, {"message": "Weight update started"}),
    ("update/update_weights", {"update_info": UPDATE}, {"message": "Weights updated"}),
    ("update/finish_weight_update", {"weight_version": None}, {"message": "Weight update finished"}),
    ("update/start_draft_weight_update", None, {"message": "Draft weight update started"}),
    ("update/update_weights", {"update_info": UPDATE}, {"message": "Weights updated"}),
    ("update/finish_weight_update", {"weight_version": "7"}, {"message": "Weight update finished"}),
    ("control/get_weight_version", {}, {"weight_version": "7"}),
    ("update/update_weight_version", {"new_version": "8"}, {"success": True, "new_version": "8"}),
    ("control/get_weight_version", None, {"weight_version": "8"}),
    ("control/resume_generation", {}, {"status": "resumed"}),
    ("control/is_paused", {}, {"is_paused": False}),
    ("control/sleep", {"level": 2, "mode": "keep"}, {"status": "sleeping"}),
    ("control/is_sleeping", {}, {"is_sleeping": True}),
    ("control/wake_up", {"tags": ["weights"]}, {"status": "partially_awake", "is_sleeping": True}),
    ("control/wake_up", {"tags": ["kv_cache", "scheduling"]}, {"status": "awake"}),
]


async def test_every_operation_reaches_every_worker_once():
    async with dynamo() as fleet:
        fleet.enable()
        for name, body, reply in STEPS:
            assert await fleet.answer(f"/engine/{name}", body) == (200, reply), name
        asked = [
            "pause",
            "init",
            "start",
            "update",
            "finish",
            "start",
            "update",
            "finish",
            "label",
            "resume",
            "sleep",
            "wake_up",
            "wake_up",
        ]
        assert [engine.asked for engine in fleet.engines] == [asked] * 2
        assert [engine.sent["pause"] for engine in fleet.engines] == [(PauseMode.KEEP, False)] * 2
        assert [engine.sent["init"]["rank_offset"] for engine in fleet.engines] == [1, 2]


async def test_one_worker_is_reached_alone_and_its_trainer_numbers_it():
    async with dynamo() as fleet:
        fleet.enable()
        assert await fleet.answer("/workers/w1/engine/control/pause_generation") == (200, {"status": "paused"})
        assert (await fleet.answer("/workers/w1/engine/update/init_weight_transfer_engine", {"init_info": {"rank_offset": 7}}))[0] == 200
        assert [engine.asked for engine in fleet.engines] == [[], ["pause", "init"]]
        assert fleet.engines[1].sent["init"] == {"rank_offset": 7}


@pytest.mark.parametrize(
    ("capability", "names"),
    [
        ("supports_sleep", ["control/sleep", "control/wake_up"]),
        (
            "weight_transfer_backend",
            [f"update/{name}_weight_{what}" for name, what in (("init", "transfer_engine"), ("start", "update"), ("finish", "update"))]
            + ["update/update_weights"],
        ),
        ("supports_draft_updates", ["update/start_draft_weight_update"]),
        ("supports_lora", ["update/load_lora", "update/unload_lora", "update/list_loras"]),
    ],
)
async def test_what_one_worker_can_not_is_a_404_and_not_advertised(capability, names):
    async with dynamo() as fleet:
        fleet.enable()
        [row] = await fleet.discover()
        assert set(names) <= set(row["routes"])
        fleet.enable(fleet.workers[1], **{capability: type(getattr(fleet.workers[1].info, capability))()})
        [row] = await fleet.discover()
        assert not set(names) & set(row["routes"])
        for name in names:
            status, told = await fleet.answer(f"/engine/{name}", {})
            assert (status, told["error"]) == (404, "Route not found")
        assert [engine.asked for engine in fleet.engines] == [[], []]


async def test_is_sleeping_stays_without_a_sleep_mode():
    async with dynamo() as fleet:
        assert await fleet.answer("/engine/control/is_sleeping") == (200, {"is_sleeping": False})


async def test_methods_of_the_engine_need_its_http_server():
    async with dynamo() as fleet:
        fleet.workers[0].http = None
        [row] = await fleet.discover()
        assert not {"update_weights_from_disk", "update_weights_from_distributed", "init_weights_update_group"} & set(row["routes"])
        assert (await fleet.answer("/engine/update_weights_from_disk", {"model_path": "/m"}))[0] == 404


@pytest.mark.parametrize(
    "path", ["/engine/control/nope", "/engine/nope", "/engine/update/pause_generation", "/workers/w7/engine/is_paused"]
)
async def test_an_unknown_route_is_a_404(path):
    async with dynamo() as fleet:
        status, told = await fleet.answer(path)
        assert (status, told["error"]) == (404, "Route not found")


# --- what is wrong ------------------------------------------------------------------------------------------------------------------


async def test_a_body_that_is_no_json_is_a_400():
    async with dynamo() as fleet:
        status, told = await fleet.answer("/engine/control/is_paused", b"{")
        assert (status, told["error"]) == (400, "Invalid JSON")


async def test_a_body_that_is_no_object_is_a_200_that_says_so():
    async with dynamo() as fleet:
        assert await fleet.answer("/engine/control/is_paused", b"[]") == (200, {"status": "error", "message": "the body must be an object"})


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("pause_generation", {"mode": "stop"}),
        ("pause_generation", {"clear_cache": "no"}),
        ("sleep", {"level": 3}),
        ("sleep", {"level": -1}),
        ("wake_up", {"tags": ["everything"]}),
        ("wake_up", {"tags": "weights"}),
    ],
)
async def test_wrong_arguments_of_a_control_fail_before_a_worker_hears_of_it(name, body):
    async with dynamo() as fleet:
        fleet.enable()
        status, told = await fleet.answer(f"/engine/control/{name}", body)
        assert (status, told["status"]) == (200, "error")
        assert [engine.asked for engine in fleet.engines] == [[], []]


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("init_weight_transfer_engine", {}),
        ("init_weight_transfer_engine", {"init_info": [1]}),
        ("update_weights", {"update_info": None}),
        ("update_weights", {"update_info": [{}]}),
        ("finish_weight_update", {"weight_version": 7}),
        ("update_weight_version", {"new_version": ""}),
        ("update_weight_version", {}),
    ],
)
async def test_wrong_arguments_of_an_update_are_a_500(name, body):
    async with dynamo() as fleet:
        fleet.enable()
        status, told = await fleet.answer(f"/engine/update/{name}", body)
        assert (status, told["error"]) == (500, "Handler error")
        assert [engine.asked for engine in fleet.engines] == [[], []]


@pytest.mark.parametrize("error", [broken("no such thing"), GRPCError(Status.UNIMPLEMENTED, "no such thing")])
async def test_what_a_worker_refuses_is_a_500_that_names_it(error):
    async with dynamo() as fleet:
        fleet.engines[1].fails["pause"] = [error]
        status, told = await fleet.answer("/engine/control/pause_generation")
        assert (status, told["error"]) == (500, "Handler error")
        assert "w1: no such thing" in told["message"]
        assert [worker.state for worker in fleet.workers] == ["ready", "ready"]


async def test_an_operation_on_a_worker_that_is_not_there_is_a_200_that_says_so():
    async with dynamo() as fleet:
        fleet.workers[1].state = "gone"
        status, told = await fleet.answer("/workers/w1/engine/control/is_paused")
        assert (status, told["status"]) == (200, "error")


async def test_versions_that_differ_are_no_version_and_no_error():
    async with dynamo() as fleet:
        fleet.engines[0].version, fleet.engines[1].version = "6", "7"
        assert await fleet.answer("/engine/control/get_weight_version") == (200, {"weight_version": "6, 7"})


async def test_a_resume_says_that_the_engines_sleep_on():
    async with dynamo() as fleet:
        fleet.enable()
        for engine in fleet.engines:
            engine.asleep = True
        assert await fleet.answer("/engine/control/resume_generation") == (200, {"status": "resumed", "is_sleeping": True})


# --- the routes of Python workers -------------------------------------------------------------------------------------------------------


async def test_prime_rl_drives_the_routes_of_python_workers():
    async with dynamo() as fleet:
        group = {"host": "t", "port": 1, "rank_offset": 0, "inference_world_size": 4, "timeout": 9, "session_id": "default"}
        for name, body, reply in [
            ("init_weights_update_group", {**group, "engine_rpc": "init_broadcaster"}, {"status": "ok"}),
            ("pause_generation", {"mode": "keep", "clear_cache": False}, {"status": "ok"}),
            (
                "update_weights_from_distributed",
                {"engine_rpc": "update_weights_from_path", "weight_dir": None, "weight_version": "3"},
                {"status": "ok"},
            ),
            ("get_weight_version", None, {"status": "ok", "version": "3"}),
            ("update_weights_from_disk", {"engine_rpc": "update_weights_from_path", "model_path": "/s/step_4"}, {"status": "ok"}),
            ("update_weights_from_disk", {"model_path": "/s/step_5", "weight_version": "5"}, {"status": "ok"}),
            ("resume_generation", {}, {"status": "ok"}),
        ]:
            assert await fleet.answer(f"/engine/{name}", body) == (200, reply), name
        for offset, sent in zip((0, 1), fleet.sent, strict=True):
            assert sent == [
                {"method": "init_broadcaster", "args": [], "kwargs": {**group, "rank_offset": offset}},
                {"method": "update_weights_from_path", "args": [None]},
                {"method": "update_weights_from_path", "args": ["/s/step_4"]},
                {"method": "reload_weights", "kwargs": {"weights_path": "/s/step_5"}},
            ]
        assert [engine.version for engine in fleet.engines] == ["5", "5"]


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("update_weights_from_disk", {}),
        ("update_weights_from_disk", {"model_path": "/m", "engine_rpc": "execute"}),
        ("update_weights_from_distributed", {}),
        ("init_weights_update_group", {"host": "t", "engine_rpc": "execute"}),
    ],
)
async def test_a_method_that_is_none_of_an_update_is_refused(name, body):
    async with dynamo() as fleet:
        status, told = await fleet.answer(f"/engine/{name}", body)
        assert (status, told["status"]) == (200, "error")
        assert fleet.sent == [[], []]


# --- adapters -----------------------------------------------------------------------------------------------------------------------

LOAD = {"lora_name": " math ", "source": {"uri": "file:///out/step%201"}}


@pytest.mark.parametrize("path", ["/v1/loras", "/workers/w0/v1/loras", "/engine/update/load_lora", "/workers/w0/engine/update/load_lora"])
@pytest.mark.parametrize("inplace", [True, False])
async def test_an_adapter_is_loaded_everywhere_whoever_is_asked(path, inplace):
    async with dynamo() as fleet:
        fleet.enable()
        status, told = await fleet.answer(path, {**LOAD, "load_inplace": inplace})
        assert (status, told["status"], told["lora_name"], told["hot_swap"]) == (200, "success", "math", inplace)
        assert told["lora_id"] > 0
        assert fleet.loras == [{"lora_name": "math", "lora_path": "/out/step 1", "load_inplace": inplace, "base_model": "tiny"}]


async def test_adapters_are_listed_and_unloaded():
    async with dynamo() as fleet:
        fleet.enable()
        _, told = await fleet.answer("/engine/update/list_loras")
        assert (told["status"], told["count"], list(told["loras"])) == ("success", 2, ["a", "b"])
        _, unloaded = await fleet.answer("/engine/update/unload_lora", {"lora_name": "a"})
        assert unloaded == {
            "status": "success",
            "message": "LoRA adapter 'a' was unloaded",
            "lora_name": "a",
            "lora_id": told["loras"]["a"],
        }


@pytest.mark.parametrize("path", ["/workers/w1/v1/loras", "/workers/w1/engine/update/load_lora"])
async def test_an_adapter_is_for_the_model_of_the_worker_that_was_asked(path):
    async with dynamo(models=["x", "y"]) as fleet:
        fleet.enable()
        assert (await fleet.answer(path, LOAD))[1]["status"] == "success"
        assert fleet.loras[0]["base_model"] == "y"
        _, told = await fleet.answer("/v1/loras", LOAD)
        assert told["message"] == "model: the fleet serves x, y; name one"


async def test_an_adapter_that_has_its_models_name_is_for_the_model_of_that_name():
    async with dynamo(models=["x", "y"]) as fleet:
        assert fleet.workers[1].info
        fleet.workers[1].info = replace(fleet.workers[1].info, models=("y", "z"))
        await fleet.answer("/workers/w1/v1/loras", {**LOAD, "lora_name": "z"})
        assert fleet.loras[0]["base_model"] == "z"


async def test_the_adapters_of_another_model_are_neither_listed_nor_unloaded():
    async with dynamo(models=["x", "y"]) as fleet:
        fleet.enable()
        fleet.loaded = {"a": "x", "b": "y"}
        _, told = await fleet.answer("/workers/w0/engine/update/list_loras")
        assert list(told["loras"]) == ["a"]
        status, told = await fleet.answer("/workers/w0/engine/update/unload_lora", {"lora_name": "b"})
        assert (status, told) == (
            200,
            {"status": "error", "message": "lora_name: the adapter 'b' is for y, and not for x", "lora_name": "b"},
        )
        assert (await fleet.answer("/workers/w1/engine/update/unload_lora", {"lora_name": "b"}))[1]["status"] == "success"


@pytest.mark.parametrize(
    "uri", ["/out/step_1", "file://host/out", "file:out", "file:///out?x", "file:///out#x", "s3://bucket/a", "hf://a", "x"]
)
async def test_a_uri_that_names_no_folder_is_refused(uri):
    async with dynamo() as fleet:
        status, told = await fleet.answer("/v1/loras", {**LOAD, "source": {"uri": uri}})
        assert (status, told["status"], told["lora_name"]) == (200, "error", " math ")
        assert fleet.loras == []


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (NotFound("lora_path: there is nothing yet", param="lora_path"), 404),
        (NotFound("The model `math` does not exist.", param="base_model"), 200),
        (BadRequest("already loaded", param="lora_name"), 200),
    ],
)
async def test_a_failure_is_a_200_unless_the_files_may_still_come(error, status):
    async with dynamo() as fleet:
        fleet.fails = error
        assert await fleet.answer("/v1/loras", LOAD) == (
            status,
            {"status": "error", "message": error.message, "lora_name": " math "},
        )


async def test_without_the_plugin_lora_there_are_no_adapters():
    async with dynamo(lora=False) as fleet:
        fleet.enable()
        [row] = await fleet.discover()
        assert not [route for route in row["routes"] if "lora" in route]
        for path in ("/v1/loras", "/engine/update/list_loras"):
            assert (await fleet.answer(path, LOAD))[0] == 404


async def test_an_adapter_for_a_worker_that_is_none_is_a_404():
    async with dynamo() as fleet:
        status, told = await fleet.answer("/workers/w7/v1/loras", LOAD)
        assert (status, told["error"], fleet.loras) == (404, "Route not found", [])
