"""The routes for trainers and operators: status and body, against the real 0.33."""

import httpx

from tests import workers
from tests.conformance.over_http.shapes import shape

# (method, path, body), each in the state that those before it have left.
STEPS = [
    ("GET", "/health", None),
    ("GET", "/load", None),
    ("GET", "/is_paused", None),
    ("POST", "/pause?mode=keep", None),
    ("GET", "/is_paused", None),
    ("GET", "/is_sleeping", None),
    ("POST", "/resume", None),
    ("POST", "/pause?mode=abort&clear_cache=false", None),
    ("POST", "/pause?mode=bad", None),
    ("POST", "/resume", None),
    ("POST", "/resume", None),
    ("GET", "/is_sleeping", None),
    ("GET", "/weight_info", None),
    ("POST", "/update_weight_version", {"new_version": "7"}),
    ("GET", "/weight_info", None),
    ("POST", "/update_weight_version", {"new_version": "default"}),
    ("GET", "/get_world_size", None),
    ("GET", "/get_world_size?include_dp=false", None),
    ("POST", "/reset_prefix_cache", None),
    ("POST", "/reset_mm_cache", None),
    ("POST", "/reset_encoder_cache", None),
    ("POST", "/abort_requests", {"request_ids": ["nobody"]}),
    ("POST", "/collective_rpc", {}),
    ("POST", "/collective_rpc", {"method": "reload_weights"}),
    ("POST", "/collective_rpc", {"method": "no_such_method"}),
    ("GET", "/kv_event_sources", None),
    ("POST", "/v1/unload_lora_adapter", {"lora_name": "nope"}),
    ("POST", "/v1/load_lora_adapter", {"lora_name": "", "lora_path": "/x"}),
    ("POST", "/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/no/such/folder"}),
]
#: 0.33 alone: another answer in 0.31, or a part that the real engine of these tests doesn't have.
CURRENT_STEPS = [
    ("POST", "/sleep?level=1", None),
    ("POST", "/wake_up?tags=weights", None),
    ("POST", "/wake_up", None),
    ("POST", "/sleep?level=7", None),
    ("POST", "/inference/v1/abort_requests", {"request_ids": []}),
    ("POST", "/init_weight_transfer_engine", {"init_info": 1}),
    ("POST", "/init_weight_transfer_engine", {"init_info": {"master_address": "h", "master_port": 1, "rank_offset": 1, "world_size": 2}}),
    ("POST", "/pause", None),
    ("POST", "/finish_weight_update", None),
    ("POST", "/start_weight_update", None),
    ("POST", "/update_weights", {"update_info": 1}),
    ("POST", "/update_weights", {"update_info": {"names": ["w"], "dtype_names": ["float32"], "shapes": [[1]]}}),
    ("POST", "/update_weights", {"update_info": [{"names": ["w"], "dtype_names": ["float32"], "shapes": [[1]]}]}),
    ("POST", "/finish_weight_update", {"weight_version": "8"}),
    ("GET", "/weight_info", None),
    ("POST", "/update_weight_version", {"new_version": "default"}),
    ("POST", "/resume", None),
    ("POST", "/shutdown_weight_transfer_engine", None),
    ("POST", "/collective_rpc", {"method": "reload_weights"}),
]


def answer(client, step):
    """Status, content type, and the body: as it is where it is one word, its shape where there is an error's text in it."""
    method, path, sent = step
    response = client.request(method, path, json=sent)
    if not response.content:
        return response.status_code, "content-type" in response.headers, b""
    value = response.json()
    if "error" in value:
        error = value["error"]
        return response.status_code, shape(value), error["type"], error["param"], error["code"]
    return response.status_code, response.headers["content-type"], value


def test_every_route_answers_as_0_33_does(measure, other, version):
    for step in STEPS:
        wanted, got = answer(measure, step), answer(other, step)
        if version < (0, 33) and wanted[0] >= 400:
            assert got[0] == wanted[0], step
        else:
            assert got == wanted, step


def test_the_stand_in_has_what_0_31_has_not(measure, stand_in_worker):
    with httpx.Client(base_url=stand_in_worker.http, timeout=30, trust_env=False) as stand_in:
        for step in CURRENT_STEPS:
            assert answer(stand_in, step) == answer(measure, step), step


def test_models_are_listed_with_their_adapters(measure, other, tmp_path, other_worker):
    (tmp_path / "adapter_config.json").write_text("{}")
    for client in (measure, other):
        path = str(workers.adapter() if client is other and other_worker.kind == "engine" else tmp_path)
        added = client.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": path})
        assert (added.status_code, added.text) == (200, "Success: LoRA adapter 'a' added successfully.")
        again = client.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": path})
        assert (again.status_code, again.json()["error"]["param"]) == (400, "lora_name")
        model, adapter = client.get("/v1/models").json()["data"]
        removed = client.post("/v1/unload_lora_adapter", json={"lora_name": "a"})
        assert (removed.status_code, removed.text) == (200, "Success: LoRA adapter 'a' removed successfully.")
        assert list(model) == list(adapter) == ["id", "object", "created", "owned_by", "root", "parent", "max_model_len"]
        assert (model["id"], model["parent"], model["max_model_len"]) == ("tiny", None, 2048)
        assert (adapter["id"], adapter["root"], adapter["parent"], adapter["max_model_len"]) == ("a", path, "tiny", None)


def test_the_version_names_engine_and_server(measure, other, version):
    for client, number in ((measure, "0.33.0"), (other, "0.33.0" if version >= (0, 33) else "0.31.0")):
        versions = client.get("/version").json()
        assert list(versions) == ["version", "rust_frontend_version"]
        assert versions["version"].startswith(number)
        assert versions["rust_frontend_version"] == number


def test_metrics_count_requests_and_tokens(measure, other):
    for client in (measure, other):
        text = client.get("/metrics").text
        for name in ("vllm:num_requests_running{", "vllm:num_requests_waiting{", "vllm:generation_tokens_total{"):
            assert f"\n{name}" in text
