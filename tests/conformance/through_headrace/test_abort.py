"""`/abort_requests`: whatever has become of a call, its client is told that it was aborted."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.conformance.through_headrace.calls import PATH, body
from tests.conformance.through_headrace.test_pause import waiting
from tests.proxy import wait_for

#: With it the scripted engine says nothing (`tests/workers/scripted_engine`).
SILENT = [1, 65]


def finishes(response):
    """The finish reason of each choice, by index."""
    assert response.status_code == 200, response.text
    return {choice["index"]: choice["finish_reason"] for choice in response.json()["choices"]}


@pytest.mark.parametrize("sampling", [{}, {"n": 3}, {"extra_args": {"a": 1}}, {"n": 2, "extra_args": {"a": 1}}], ids=str)
def test_a_call_on_a_worker_is_aborted_with_every_output_over_either_wire(scripted_client, scripted_worker, sampling):
    count = sampling.get("n", 1)
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(scripted_client.post, PATH, json=body(prompt=SILENT, request_id="mine", sampling=sampling))
        wait_for(lambda: scripted_worker.running_requests() == count)
        assert scripted_client.post("/abort_requests", json={"request_ids": ["mine"]}).status_code == 200
        assert finishes(asked.result(timeout=30)) == dict.fromkeys(range(count), "abort")
    wait_for(lambda: scripted_worker.running_requests() == 0)


def test_an_abort_without_ids_ends_all_calls(scripted_client, scripted_worker):
    with ThreadPoolExecutor() as pool:
        asked = [pool.submit(scripted_client.post, PATH, json=body(prompt=SILENT, request_id=id_)) for id_ in "ab"]
        wait_for(lambda: scripted_worker.running_requests() == 2)
        assert scripted_client.post("/abort_requests", json={}).status_code == 200
        assert [finishes(one.result(timeout=30)) for one in asked] == [{0: "abort"}] * 2
    wait_for(lambda: scripted_worker.running_requests() == 0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_at_the_gate_is_aborted_and_never_runs(client, proxy, worker, stream):
    assert client.post("/pause?mode=keep&clear_cache=false").status_code == 200
    try:
        with ThreadPoolExecutor() as pool:
            asked = pool.submit(client.post, PATH, json=body(request_id="mine", stream=stream))
            wait_for(lambda: waiting(proxy) == 1)
            assert client.post("/abort_requests", json={"request_ids": ["mine"]}).status_code == 200
            response = asked.result(timeout=30)
    finally:
        client.post("/resume").raise_for_status()
    assert (response.status_code, '"finish_reason":"abort"' in response.text) == (200, True)
    assert response.text.endswith("data: [DONE]\n\n") is stream
    assert proxy.settled(response.headers["x-request-id"])["worker"] == ""
    assert waiting(proxy) == 0
