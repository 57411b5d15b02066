"""Which wire says it to a worker, and what its answers mean."""

import json
from typing import Any, cast

import httpx
import pytest
from grpclib.const import Status

from core.wire import ConnectionLost
from plugins.lora import on_worker
from plugins.lora.on_worker import WorkerFailed
from plugins.lora.source import Source
from tests.unit.core.rig import make_worker
from tests.unit.plugins.lora.fleet import Control, refused

FOLDER = Source("/adapters/math")
THREE_D = Source("/adapters/math", is_3d=True)
PREFIXES = refused("Local LoRA adapter path is outside the configured allowed prefixes.", Status.INVALID_ARGUMENT)


class Http:
    """An HTTP server in memory: its answers by path, and what it was asked."""

    def __init__(self, *answers: httpx.Response) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, Any]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append((request.url.path, json.loads(request.content) if request.content else None))
        return self.answers.pop(0)


def worker(control: Control | None = None, http: Any = None):
    made = make_worker("w")
    made.control = cast("Any", control)
    made.http = http and httpx.AsyncClient(transport=httpx.MockTransport(http), base_url="http://w")
    return made


def ok() -> httpx.Response:
    return httpx.Response(200, text="Success: LoRA adapter 'math' added successfully.")


def error(status: int, message: str) -> httpx.Response:
    return httpx.Response(status, json={"error": {"message": message, "type": "BadRequestError", "param": None, "code": status}})


async def failure_of(worker, source=FOLDER):
    with pytest.raises(WorkerFailed) as failed:
        await on_worker.load(worker, "math", source)
    return str(failed.value), failed.value.status, failed.value.certain


async def test_grpc_is_the_first_choice():
    control, http = Control(), Http()
    await on_worker.load(worker(control, http), "math", FOLDER)
    assert (control.held, http.asked) == ({"math": "/adapters/math"}, [])


async def test_a_worker_without_grpc_is_asked_over_http():
    http = Http(ok())
    await on_worker.load(worker(http=http), "math", FOLDER)
    assert http.asked == [("/v1/load_lora_adapter", {"lora_name": "math", "lora_path": "/adapters/math"})]


async def test_3d_weights_go_over_http():
    control, http = Control(), Http(ok())
    await on_worker.load(worker(control, http), "math", THREE_D)
    body = {"lora_name": "math", "lora_path": "/adapters/math", "is_3d_lora_weight": True}
    assert (control.asked, http.asked) == ([], [("/v1/load_lora_adapter", body)])
    text, status, certain = await failure_of(worker(Control()), THREE_D)
    assert (status, certain) == (400, True)
    assert text.startswith("is_3d_lora_weight: gRPC can't say it")


async def test_what_grpc_refuses_by_its_path_rule_is_tried_over_http():
    control, http = Control(), Http(ok())
    control.failures["load"] = [PREFIXES]
    await on_worker.load(worker(control, http), "math", FOLDER)
    assert [path for path, _ in http.asked] == ["/v1/load_lora_adapter"]


@pytest.mark.parametrize("closed", [httpx.Response(404), httpx.Response(405), httpx.Response(404, json={"detail": "Not Found"})])
async def test_a_closed_http_route_leaves_the_answer_of_grpc(closed):
    control = Control()
    control.failures["load"] = [PREFIXES]
    assert await failure_of(worker(control, Http(closed))) == (PREFIXES.message, 400, True)
    control.failures["load"] = [PREFIXES]
    assert await failure_of(worker(control)) == (PREFIXES.message, 400, True)


async def test_a_closed_http_route_is_named():
    text, status, certain = await failure_of(worker(http=Http(httpx.Response(404))))
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" in text
    assert (status, certain) == (400, True)  # not a 404: trying again is no use


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (error(400, "Local LoRA adapter path must exist and be accessible."), (404, True)),
        (error(400, "LoRA rank 64 is greater than max_lora_rank 16."), (400, True)),
        (error(500, "failed to load LoRA adapter `math`"), (500, False)),
        (error(503, "paused"), (500, False)),
        (httpx.Response(500, text="Internal Server Error"), (500, False)),
        (httpx.Response(500, json=["what"]), (500, False)),
    ],
)
async def test_the_answers_of_http_have_the_same_meanings(answer, expected):
    assert (await failure_of(worker(http=Http(answer))))[1:] == expected


async def test_a_name_that_is_taken_is_good_when_the_path_is_the_same():
    taken = error(400, "LoRA adapter `math` is already loaded. If you want to load the adapter in place, set 'load_inplace' to true.")

    def cards(path: str) -> httpx.Response:
        data = [{"id": "tiny", "root": "/m", "parent": None}, {"id": "math", "root": path, "parent": "tiny"}]
        return httpx.Response(200, json={"object": "list", "data": data})

    await on_worker.load(worker(http=Http(taken, cards("/adapters/math"))), "math", FOLDER)
    text, status, certain = await failure_of(worker(http=Http(taken, cards("/elsewhere"))))
    assert (status, certain) == (500, True)
    assert "already loaded" in text


async def test_what_cannot_be_reached_is_probed_and_may_be_tried_again():
    def gone(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    lost = worker(http=gone)
    assert await failure_of(lost) == ("refused", 500, False)
    await lost.suspected()
    control = Control()
    control.failures["load"] = [ConnectionLost("reset", sent=True)]
    lost = worker(control)
    assert await failure_of(lost) == ("reset", 500, False)
    await lost.suspected()


async def test_unloading_what_is_not_there_is_done():
    await on_worker.unload(worker(Control()), "math")
    await on_worker.unload(worker(http=Http(error(404, "The model `math` does not exist."))), "math")


async def test_unloading_over_a_closed_route_fails():
    with pytest.raises(WorkerFailed, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING"):
        await on_worker.unload(worker(http=Http(httpx.Response(404))), "math")


async def test_what_cant_be_read_is_a_failure():
    for answer in (httpx.Response(200, text="<html>"), httpx.Response(200, json={"data": [7]})):
        with pytest.raises(WorkerFailed, match="can't be read"):
            await on_worker.held(worker(http=Http(answer)))
