"""Encode workers behind a real headrace: they look at a call's pictures first, and what they return reaches the next worker as it is."""

import base64
import contextlib
import json
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from core import Role
from tests import workers
from tests.proxy import RunningProxy, headrace, wait_for
from tests.workers import Kind, RunningWorker
from tests.workers.images import IN_PROMPT, OFFSET, TOKENS, png, prepared
from tests.workers.scripted_engine.behaviour import Behaviour
from tests.workers.scripted_engine.encoding import ec_items
from tests.workers.tiny_vision import IMAGE, VISION_END, VISION_START, VOCAB_SIZE

PATH = "/inference/v1/generate"
EACH_KIND = pytest.mark.parametrize("kind", ["stand-in", pytest.param("scripted", marks=pytest.mark.real)])


def worker(kind: Kind, role: Role, shared: Path, **options: Any) -> contextlib.AbstractContextManager[RunningWorker]:
    """A worker that sees; as an encode worker, it does nothing else."""
    if reason := workers.why_not(kind):
        pytest.skip(f"no {kind} worker here: {reason}")
    if kind == "scripted":
        return workers.scripted(sees=True, encodes=role == "encode")
    ec_role = "ec_producer" if role == "encode" else "ec_consumer"
    config = {"ec_connector": "ECExampleConnector", "ec_role": ec_role, "ec_connector_extra_config": {"shared_storage_path": str(shared)}}
    return workers.stand_in(enable_media=True, ec_transfer_config=json.dumps(config), vocab_size=VOCAB_SIZE, **options)


class Fleet(NamedTuple):
    """Three workers, and headraces in front of some of them."""

    encode: RunningWorker
    first: RunningWorker
    second: RunningWorker
    whole: RunningProxy  #: `encode`, and `first` for all the rest
    apart: RunningProxy  #: `encode`, `first` for the prompt, `second` for the output
    alone: RunningProxy  #: `first`


def fleet_of(kind: Kind, shared: Path) -> Iterator[Fleet]:
    with (
        worker(kind, "encode", shared) as encode,
        worker(kind, "prefill", shared) as first,
        worker(kind, "decode", shared) as second,
        headrace(encode, first, roles=("encode", "aggregated")) as whole,
        headrace(encode, first, second, roles=("encode", "prefill", "decode")) as apart,
        headrace(first) as alone,
    ):
        yield Fleet(encode, first, second, whole, apart, alone)


@pytest.fixture(scope="module", params=["stand-in", pytest.param("scripted", marks=pytest.mark.real)])
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    yield from fleet_of(request.param, tmp_path_factory.mktemp("seen"))


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    yield from fleet_of("scripted", tmp_path_factory.mktemp("seen"))


def call(*, picture: int = 1, start: tuple[int, int] = (40, 41), stream: bool = False, **members: Any) -> dict[str, Any]:
    """A call with a picture, which is prepared."""
    sampling = {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True}
    features = {
        "mm_hashes": {"image": [f"picture-{picture}"]},
        "mm_placeholders": {"image": [{"offset": len(start) + OFFSET, "length": TOKENS}]},
        "kwargs_data": {"image": [base64.b64encode(prepared(picture)).decode()]},
    }
    sent = {"token_ids": [*start, *IN_PROMPT, *range(60, 80)], "sampling_params": sampling, "stream": stream, "features": features}
    return sent | members


def post(proxy: RunningProxy, sent: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{proxy.url}{PATH}", json=sent, timeout=60, trust_env=False)


def tokens(response: httpx.Response) -> list[int]:
    assert response.status_code == 200, response.text
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.removeprefix("data: ").startswith("{")]
    return [token for line in lines for choice in json.loads(line)["choices"] for token in choice["token_ids"]]


@pytest.mark.parametrize("stream", [False, True])
def test_a_picture_is_looked_at_first_and_the_output_is_that_of_one_worker(fleet, stream):
    response = post(fleet.whole, call(stream=stream))
    assert response.headers["x-headrace-route"] == "encode=w0 (round-robin), aggregated=w1 (round-robin)"
    assert tokens(response) == tokens(post(fleet.alone, call()))


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_and_output_are_made_elsewhere_again(fleet, stream):
    response = post(fleet.apart, call(stream=stream))
    assert response.headers["x-headrace-route"] == "encode=w0 (round-robin), prefill=w1 (round-robin), decode=w2 (round-robin)"
    assert tokens(response) == tokens(post(fleet.alone, call()))
    wait_for(lambda: not sum(one.running_requests() for one in (fleet.encode, fleet.first, fleet.second)))
    assert fleet.apart.in_flight() == 0


def test_a_call_without_a_picture_has_nothing_to_look_at(fleet):
    sent = call(token_ids=list(range(60, 80)))
    del sent["features"]
    response = post(fleet.whole, sent)
    assert len(tokens(response)) == 4
    assert response.headers["x-headrace-route"] == "round-robin"


# --- what the engines see --------------------------------------------------------------------------------------------------------


def added(one: RunningWorker, response: httpx.Response) -> dict[str, Any]:
    """The call as it reached an engine."""
    assert response.status_code == 200, response.text
    [event] = [event for event in one.engine_events("add") if event["external_req_id"] == response.headers["x-request-id"]]
    return event


def handed(event: dict[str, Any]) -> Any:
    """An engine's `ec_transfer_params`; as text, for 5601 and 5601.0 are equal numbers."""
    return json.dumps(event["sampling_params"].get("extra_args", {}).get("ec_transfer_params"), sort_keys=True)


def returned(event: dict[str, Any]) -> str:
    """What the encode worker's engine has returned for a call."""
    return json.dumps({"ec_items": ec_items([feature["identifier"] for feature in event["mm_features"]])}, sort_keys=True)


@pytest.mark.real
@pytest.mark.parametrize("stream", [False, True])
def test_what_was_returned_over_grpc_reaches_the_next_engine_as_it_is_and_the_pixels_do_not(scripted, stream):
    response = post(scripted.whole, call(stream=stream))
    looked, went_on = added(scripted.encode, response), added(scripted.first, response)
    assert (looked["sampling_params"]["max_tokens"], handed(looked)) == (1, "null")
    assert handed(went_on) == returned(looked)
    # The real server leaves out of a picture what the engine finds elsewhere.
    assert [sorted(event["mm_features"][0]["data"]) for event in (looked, went_on)] == [
        ["image_grid_thw", "pixel_values"],
        ["image_grid_thw"],
    ]


@pytest.mark.real
def test_what_was_returned_over_http_reaches_the_next_engine_as_it_is(scripted):
    parts = [{"type": "image_url", "url": f"data:image/png;base64,{base64.b64encode(png(255, 0, 0)).decode()}"}]
    sent = call(token_ids=[VISION_START, IMAGE, VISION_END, *range(60, 80)], content_parts=parts)
    del sent["features"]
    response = post(scripted.whole, sent)
    assert handed(added(scripted.first, response)) == returned(added(scripted.encode, response))


@pytest.mark.real
def test_it_is_for_the_worker_that_computes_the_prompt_and_for_no_other(scripted):
    response = post(scripted.apart, call())
    assert handed(added(scripted.first, response)) == returned(added(scripted.encode, response))
    assert handed(added(scripted.second, response)) == "null"


# --- what goes wrong -------------------------------------------------------------------------------------------------------------


@pytest.mark.real
@pytest.mark.parametrize(
    ("behaviour", "status", "message", "looks"),
    [
        (Behaviour.ERROR, 500, "encode: engine failed during generation", 2),
        (Behaviour.VALIDATION_ERROR, 400, "scripted validation error", 1),
    ],
)
def test_what_two_encode_workers_fail_at_is_reported_and_goes_no_further(tmp_path, behaviour, status, message, looks):
    with (
        worker("scripted", "encode", tmp_path) as one,
        worker("scripted", "encode", tmp_path) as other,
        worker("scripted", "aggregated", tmp_path) as whole,
        headrace(one, other, whole, roles=("encode", "encode", "aggregated")) as proxy,
    ):
        response = post(proxy, call(start=(behaviour, 0)))
        assert (response.status_code, response.json()["error"]["message"]) == (status, message)
        assert len(one.engine_events("add") + other.engine_events("add")) == looks
        assert whole.engine_events("add") == []
        assert proxy.in_flight() == 0


def slow(kind: Kind) -> dict[str, Any]:
    """Options of a worker that takes a minute for whatever it is asked. A scripted one is told otherwise."""
    return {"token_delay": 60} if kind == "stand-in" else {}


@contextlib.contextmanager
def halted(one: RunningWorker) -> Iterator[None]:
    """A scripted engine that stands still; a stand-in is slow anyway."""
    if one.kind == "stand-in":
        yield
        return
    one.send_signal(signal.SIGSTOP, process=1)
    try:
        yield
    finally:
        one.send_signal(signal.SIGCONT, process=1)


@EACH_KIND
def test_a_picture_is_looked_at_elsewhere_when_the_one_who_looks_dies(kind: Kind, tmp_path):
    with (
        worker(kind, "encode", tmp_path, **slow(kind)) as dying,
        worker(kind, "encode", tmp_path) as other,
        worker(kind, "aggregated", tmp_path) as whole,
        headrace(dying, other, whole, roles=("encode", "encode", "aggregated")) as proxy,
        halted(dying),
        ThreadPoolExecutor(1) as thread,
    ):
        response = thread.submit(post, proxy, call())
        wait_for(lambda: proxy.fleet()[0]["in_flight"])
        dying.send_signal(signal.SIGKILL)
        assert len(tokens(response.result())) == 4
        assert response.result().headers["x-headrace-route"].startswith("encode=w1 (round-robin), aggregated=w2")
        assert proxy.in_flight() == 0


@EACH_KIND
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_dies_while_its_picture_is_looked_at_leaves_nothing(kind: Kind, stream: bool, tmp_path):
    with (
        worker(kind, "encode", tmp_path, **slow(kind)) as encode,
        worker(kind, "aggregated", tmp_path) as whole,
        headrace(encode, whole, roles=("encode", "aggregated")) as proxy,
    ):
        data = json.dumps(call(start=(Behaviour.SILENT, 0), stream=stream)).encode()
        with proxy.connect() as connection:
            connection.sendall(f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
            wait_for(encode.running_requests)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        wait_for(lambda: not proxy.in_flight() + encode.running_requests())
        assert [event["outcome"] for event in wait_for(lambda: proxy.events("leg.settled"))] == ["cancelled"]
        assert whole.metric("vllm:prompt_tokens_total") == whole.running_requests() == 0
        assert "Traceback" not in proxy.log.read_text(encoding="utf-8")
