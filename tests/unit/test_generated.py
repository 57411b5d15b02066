"""What lies in core/wire/generated is what proto/generate.py makes, and it reads what vllm-rs 0.33.0 wrote."""

import runpy
import subprocess
import sys
from pathlib import Path

from core.wire.generated import inference_pb2, vllm
from core.wire.generated.grpc.health.v1 import HealthBase, HealthStub

ROOT = Path(__file__).resolve().parents[2]
GENERATOR = ROOT / "proto" / "generate.py"


def test_the_committed_package_is_what_the_generator_makes():
    command = [sys.executable, GENERATOR, "--check"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_changed_a_missing_and_a_surplus_file_are_differences(tmp_path):
    differences = runpy.run_path(str(GENERATOR))["differences"]
    one, other = tmp_path / "one", tmp_path / "other"
    for folder, files in (
        (one, {"same": b"1", "changed": b"1", "missing": b"1"}),
        (other, {"same": b"1", "changed": b"2", "surplus": b""}),
    ):
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_bytes(content)
    assert differences(one, other) == ["changed", "missing", "surplus"]


def test_server_info_of_vllm_rs_is_read():
    info = vllm.ServerInfo.parse(
        b'\n\x06fake-0\x12\x04vllm\x1a\x06inst-1"\x0c\x08\x01\x10\x01\x18\x01(\x010\x018\x01(\x80\x100\x108d@@H\x80\x10P\x02'
        b"Z\n\x08\x01\x12\x04nccl\x18\x01b\x050.6.0p\x10"
    )
    assert info.parallelism is not None
    assert info.rl_capabilities is not None
    assert (info.engine_version, info.api_version, info.instance_id, info.proto_version) == ("fake-0", "vllm", "inst-1", "0.6.0")
    assert (info.max_model_len, info.kv_block_size, info.total_kv_blocks, info.max_running_requests) == (2048, 16, 100, 64)
    assert (info.max_batched_tokens, info.max_loras, info.effective_attention_block_size) == (2048, 2, 16)
    assert (info.parallelism.decode_context_parallel_size, info.parallelism.world_size) == (1, 1)
    assert info.parallelism.data_parallel_size_local == 1
    assert info.rl_capabilities == vllm.RlCapabilities(
        weight_transfer_enabled=True, weight_transfer_backend="nccl", sleep_mode_enabled=True
    )


def test_model_info_of_vllm_rs_is_read():
    info = vllm.ModelInfo.parse(b"\n\r/models/model\x12\x04tiny\x1a\x05alias\xa0\x01\x01\xa8\x01\x01\xb0\x01\x01")
    assert (info.served_model_name, info.served_model_aliases) == ("tiny", ["alias"])
    assert (info.supports_text_input, info.supports_token_ids_input, info.supports_lora) == (True, True, True)
    assert not info.supports_multimodal


def test_kv_event_sources_of_vllm_rs_are_read():
    response = vllm.GetKvEventSourcesResponse.parse(
        b'\n=\n\x03zmq\x12\x0ctcp://*:5557\x1a\x02kv"\x0ctcp://*:5558(\x002\x07msgpack8\x01@\x90NH\xa1\x8d\x06P\xa2\x8d\x06'
    )
    assert response.sources == [
        vllm.KvEventSource(
            transport="zmq",
            endpoint="tcp://*:5557",
            topic="kv",
            replay_endpoint="tcp://*:5558",
            data_parallel_rank=0,
            encoding="msgpack",
            schema_version=1,
            buffer_steps=10000,
            hwm=100001,
            max_queue_size=100002,
        )
    ]


def test_a_loaded_adapter_of_vllm_rs_is_read():
    response = vllm.LoadLoraResponse.parse(b"\n\x0b\x08\x01\x12\x01a\x1a\x04hf/x")
    assert response.adapter == vllm.LoraAdapter(lora_id=1, lora_name="a", source_path="hf/x")


def test_inference_messages_are_upb():
    from google.protobuf.internal import api_implementation

    assert api_implementation.Type() == "upb"
    request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[1, 300]), temperature=0.0)
    assert request.SerializeToString() == b"\x22\x05\x0a\x03\x01\xac\x02\x2d\x00\x00\x00\x00"


def test_stubs_and_server_bases_speak_of_the_same_rpcs():
    assert set(vllm.ControlBase().__mapping__()) >= {"/vllm.Control/GetServerInfo", "/vllm.Control/ListLoras"}
    assert len(vllm.ControlBase().__mapping__()) == 21
    assert set(HealthBase().__mapping__()) == {"/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"}
    assert hasattr(HealthStub, "watch")
