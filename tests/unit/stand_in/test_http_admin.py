"""The other routes: what they answer, and what happens to requests that nobody answers."""

import pytest

from core.wire.generated import vllm
from tests.unit.stand_in.serving import over_asyncio, worker


@over_asyncio
async def test_both_wires_tell_who_the_worker_is():
    async with worker(model="org/model", served_model_names=("m", "alias"), world_size=4, max_model_len=100) as stand_in:
        info = await stand_in.control.get_model_info(vllm.GetModelInfoRequest())
        assert (info.model_id, info.served_model_name, info.served_model_aliases) == ("org/model", "m", ["alias"])
        assert (info.supports_text_input, info.supports_token_ids_input, info.supports_multimodal) == (True, True, False)
        server = await stand_in.control.get_server_info(vllm.GetServerInfoRequest())
        assert server.parallelism is not None
        assert server.rl_capabilities == vllm.RlCapabilities(
            weight_transfer_enabled=True, weight_transfer_backend="nccl", sleep_mode_enabled=True
        )
        assert (server.parallelism.world_size, server.max_model_len, server.kv_block_size) == (4, 100, 16)
        assert (server.api_version, server.proto_version) == ("vllm", "0.6.0")
        assert (await stand_in.control.get_kv_event_sources(vllm.GetKvEventSourcesRequest())).sources == []
        cards = (await stand_in.http.get("/v1/models")).json()["data"]
        assert [(card["id"], card["root"], card["parent"], card["max_model_len"]) for card in cards] == [
            ("m", "org/model", None, 100),
            ("alias", "org/model", None, 100),
        ]
        assert (await stand_in.http.get("/version")).json() == {
            "version": server.engine_version,
            "rust_frontend_version": "0.33.0",
        }
        assert (await stand_in.http.get("/get_world_size")).json() == {"world_size": 4}


@over_asyncio
async def test_instances_differ():
    async with worker() as one, worker() as two:
        ids = [(await each.control.get_server_info(vllm.GetServerInfoRequest())).instance_id for each in (one, two)]
        assert ids[0] != ids[1]


@pytest.mark.parametrize(
    ("path", "json", "status"),
    [
        ("/pause", None, 200),
        ("/resume", None, 200),
        ("/wake_up", None, 200),
        ("/reset_mm_cache", None, 200),
        ("/reset_encoder_cache", None, 200),
        ("/abort_requests", None, 400),
        ("/abort_requests", {"request_ids": 3}, 400),
        ("/collective_rpc", {}, 400),
        ("/collective_rpc", {"method": "unknown"}, 500),
        ("/init_weight_transfer_engine", {"init_info": [1]}, 400),
        ("/update_weights", {}, 400),
        ("/update_weights", {"update_info": {}}, 500),
        ("/finish_weight_update", None, 500),
        ("/finish_weight_update", {"weight_version": 7}, 400),
        ("/start_draft_weight_update", None, 500),
        ("/update_weight_version", {}, 400),
        ("/update_weight_version", {"new_version": "9"}, 200),
        ("/shutdown_weight_transfer_engine", None, 200),
        ("/v1/load_lora_adapter", {"lora_name": "a"}, 400),
        ("/inference/v1/abort_requests", {"request_ids": []}, 501),
        ("/nowhere", {"a": 1}, 404),
    ],
)
@over_asyncio
async def test_statuses(path, json, status):
    async with worker() as stand_in:
        assert (await stand_in.post(path, json)).status_code == status


@pytest.mark.parametrize("value", ["x", "1", "True"])
@over_asyncio
async def test_a_flag_is_true_or_false_and_nothing_else(value):
    async with worker() as stand_in:
        assert (await stand_in.post("/pause", clear_cache=value)).status_code == 400
        assert (await stand_in.http.get("/is_paused")).json() == {"is_paused": False}


@over_asyncio
async def test_a_wrong_method_is_405_and_an_unknown_path_404_without_a_body():
    async with worker() as stand_in:
        for response, status in ((await stand_in.http.get("/pause"), 405), (await stand_in.http.get("/nowhere"), 404)):
            assert (response.status_code, response.content) == (status, b"")


@over_asyncio
async def test_a_connection_survives_a_request_that_nobody_reads():
    async with worker() as stand_in:
        for _ in range(3):
            assert (await stand_in.post("/nowhere", {"a": "x" * 100_000})).status_code == 404
        assert (await stand_in.http.get("/health")).status_code == 200


@over_asyncio
async def test_an_update_shut_down_in_the_middle_is_refused():
    async with worker() as stand_in:
        await stand_in.post("/start_weight_update")
        assert (await stand_in.post("/shutdown_weight_transfer_engine")).status_code == 500
