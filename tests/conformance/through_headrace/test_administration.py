"""The administration of one worker through headrace: the replies are those of the worker's own HTTP server."""

import httpx
import pytest

from tests.conformance.through_headrace.conftest import client_of

#: What every worker of these tests can do, and leaves it as it was.
STEPS = [
    ("POST", "/pause?mode=keep&clear_cache=false", None),
    ("GET", "/is_paused", None),
    ("POST", "/resume", None),
    ("GET", "/is_paused", None),
    ("POST", "/pause", None),
    ("POST", "/resume", None),
    ("POST", "/reset_prefix_cache", None),
    ("POST", "/update_weight_version", {"new_version": "8"}),
    ("GET", "/weight_info", None),
    ("POST", "/update_weight_version", {"new_version": "default"}),
    ("GET", "/get_world_size", None),
    ("GET", "/get_world_size?include_dp=false", None),
    ("POST", "/collective_rpc", {"method": "reload_weights"}),
    ("POST", "/abort_requests", {"request_ids": ["nobody"]}),
]
#: What vLLM 0.33 can do with a weight-transfer backend.
UPDATE_STEPS = [
    ("POST", "/init_weight_transfer_engine", {"init_info": {"master_address": "h", "master_port": 1, "rank_offset": 1, "world_size": 2}}),
    ("POST", "/pause?mode=keep", None),
    ("POST", "/start_weight_update", None),
    ("POST", "/update_weights", {"update_info": {"names": ["w"], "dtype_names": ["float32"], "shapes": [[1]]}}),
    ("POST", "/update_weights", {"update_info": [{"names": ["w"], "dtype_names": ["float32"], "shapes": [[1]]}]}),
    ("POST", "/finish_weight_update", {"weight_version": "8"}),
    ("GET", "/weight_info", None),
    ("POST", "/resume", None),
    ("POST", "/start_weight_update", None),
    ("POST", "/update_weights", {"update_info": {"names": ["w"], "dtype_names": ["float32"], "shapes": [[1]]}}),
    ("POST", "/finish_weight_update", None),
    ("POST", "/sleep", None),
    ("POST", "/wake_up?tags=weights", None),
    ("POST", "/wake_up", None),
    ("POST", "/collective_rpc", {"method": "reload_weights"}),
    ("POST", "/update_weight_version", {"new_version": "default"}),
]


def answers(client, steps):
    replies = [(method, path, client.request(method, path, json=sent)) for method, path, sent in steps]
    return [(method, path, reply.status_code, reply.json() if reply.content else b"") for method, path, reply in replies]


@pytest.mark.parametrize("prefix", ["", "/workers/w0"])
def test_the_replies_are_the_workers_own(client, worker, prefix):
    with httpx.Client(base_url=worker.http, timeout=60, trust_env=False) as direct:
        wanted = answers(direct, STEPS)
    got = answers(client, [(method, prefix + path, sent) for method, path, sent in STEPS])
    assert [(*answer[:1], answer[1].removeprefix(prefix), *answer[2:]) for answer in got] == wanted


def test_an_update_has_the_replies_of_the_worker(scripted_proxy, scripted_worker):
    with httpx.Client(base_url=scripted_worker.http, timeout=60, trust_env=False) as direct, client_of(scripted_proxy) as client:
        assert answers(client, UPDATE_STEPS) == answers(direct, UPDATE_STEPS)
