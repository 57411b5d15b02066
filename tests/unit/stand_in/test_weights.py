"""Weight updates: their steps, what they do to the tokens, and the engine's death on meta tensors."""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any, cast

import pytest
from grpclib.const import Status

from core.wire.generated import vllm
from core.wire.generated.grpc.health.v1 import HealthCheckRequest, HealthCheckResponseServingStatus
from tests.unit.stand_in.serving import Worker, begin, body, over_asyncio, refusal, request, worker

INIT = {"master_address": "10.0.0.1", "master_port": 29500, "rank_offset": 1, "world_size": 2}
NAMED = {"names": ["w"], "dtype_names": ["bfloat16"], "shapes": [[2, 2]]}

RUNNING = 'vllm:num_requests_running{model_name="stand-in",engine="0"} 1'


class Trainer:
    """The steps of an update, on gRPC."""

    def __init__(self, stand_in: Worker) -> None:
        self._control = stand_in.control

    async def init(self, info: Any = INIT) -> None:
        data = info if isinstance(info, bytes) else json.dumps(info).encode()
        await self._control.init_weight_transfer_engine(vllm.InitWeightTransferEngineRequest(init_info_json=data))

    async def start(self) -> None:
        await self._control.start_weight_update(vllm.StartWeightUpdateRequest())

    async def update(self, info: Any = NAMED) -> None:
        data = info if isinstance(info, bytes) else json.dumps(info).encode()
        await self._control.update_weights(vllm.UpdateWeightsRequest(update_info_json=data))

    async def finish(self, version: str | None = None) -> None:
        await self._control.finish_weight_update(vllm.FinishWeightUpdateRequest(weight_version=version))

    async def whole(self, version: str | None = None) -> None:
        await self.init()
        await self.start()
        await self.update()
        await self.finish(version)

    async def version(self) -> str:
        return (await self._control.get_weight_version(vllm.GetWeightVersionRequest())).weight_version


@over_asyncio
async def test_an_update_changes_the_tokens_and_publishes_the_version():
    async with worker() as stand_in:
        trainer = Trainer(stand_in)
        before = await stand_in.tokens(request())
        assert await trainer.version() == "default"
        await trainer.whole("7")
        assert await trainer.version() == "7"
        assert await stand_in.tokens(request()) != before


@over_asyncio
async def test_workers_with_different_pasts_agree_after_the_same_versioned_update():
    async with worker() as old, worker() as new:
        await Trainer(old).whole("6")
        await Trainer(old).whole("7")
        await Trainer(new).whole("7")
        assert await old.tokens(request()) == await new.tokens(request())


@over_asyncio
async def test_the_same_update_without_a_version_still_changes_the_tokens():
    async with worker() as stand_in:
        seen = [await stand_in.tokens(request())]
        for _ in range(2):
            await Trainer(stand_in).whole()
            seen.append(await stand_in.tokens(request()))
        assert len(set(map(tuple, seen))) == 3
        assert await Trainer(stand_in).version() == "default"


@over_asyncio
async def test_a_version_label_alone_changes_no_token():
    async with worker() as stand_in:
        before = await stand_in.tokens(request())
        await stand_in.control.update_weight_version(vllm.UpdateWeightVersionRequest(weight_version="9"))
        assert (await stand_in.http.get("/weight_info")).json() == {"weight_version": "9"}
        assert await stand_in.tokens(request()) == before


@over_asyncio
async def test_reload_weights_gives_the_tokens_of_its_path():
    async with worker(world_size=2) as stand_in:
        before = await stand_in.tokens(request())
        seen = []
        for path in ("/step/1", "/step/2", "/step/1"):
            rpc = {"method": "reload_weights", "kwargs": {"weights_path": path}}
            response = await stand_in.post("/collective_rpc", rpc)
            assert response.json() == {"results": [None, None]}
            seen.append(await stand_in.tokens(request()))
        assert seen[0] == seen[2]
        assert len({tuple(before), *map(tuple, seen)}) == 3


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        (["start", "start"], "already running"),
        (["init", "update"], "start one first"),
        (["finish"], "start one first"),
        (["start", "update"], "not initialized"),
        (["start", "update", "finish"], "not initialized"),
    ],
)
@over_asyncio
async def test_steps_out_of_order_are_internal_errors(steps, reason):
    async with worker() as stand_in:
        trainer = Trainer(stand_in)

        async def walk():
            for step in steps:
                await getattr(trainer, step)()

        status, message = await refusal(walk())
        assert status is Status.INTERNAL
        assert reason in message


@over_asyncio
async def test_after_a_failed_update_only_a_whole_new_one_helps():
    async with worker() as stand_in:
        trainer = Trainer(stand_in)
        await trainer.init()
        await trainer.start()
        status, _ = await refusal(trainer.update({**NAMED, "shapes": []}))
        assert status is Status.INTERNAL
        assert (await refusal(trainer.finish("7")))[0] is Status.INTERNAL
        await trainer.start()
        await trainer.update()
        await trainer.finish("7")
        assert len(await stand_in.tokens(request())) == 4


@pytest.mark.parametrize("info", [b"", b"{", b"[1]", b"3", b"\xff"])
@over_asyncio
async def test_information_that_is_no_json_object_is_an_invalid_argument(info):
    async with worker() as stand_in:
        trainer = Trainer(stand_in)
        assert (await refusal(trainer.init(info)))[0] is Status.INVALID_ARGUMENT
        assert (await refusal(trainer.update(info)))[0] is Status.INVALID_ARGUMENT


@pytest.mark.parametrize(
    "info",
    [
        {},
        {"rank_offset": 1, "world_size": 2},
        {**INIT, "nccl_unique_id_b64": "AA=="},
        {**INIT, "colour": "red"},
    ],
)
@over_asyncio
async def test_an_nccl_worker_wants_its_own_keys_to_join(info):
    async with worker() as stand_in:
        assert (await refusal(Trainer(stand_in).init(info)))[0] is Status.INTERNAL


@over_asyncio
async def test_another_backend_takes_any_object():
    async with worker(weight_transfer_backend="made-up") as stand_in:
        await Trainer(stand_in).init({"anything": 1})
        info = await stand_in.control.get_server_info(vllm.GetServerInfoRequest())
        assert info.rl_capabilities is not None
        assert info.rl_capabilities.weight_transfer_backend == "made-up"


@over_asyncio
async def test_without_a_backend_the_steps_are_refused():
    async with worker(weight_transfer_backend="") as stand_in:
        trainer = Trainer(stand_in)
        for step in (trainer.init, trainer.start, trainer.update, trainer.finish):
            assert (await refusal(step()))[0] is Status.FAILED_PRECONDITION
        draft = stand_in.control.start_draft_weight_update(vllm.StartDraftWeightUpdateRequest())
        assert (await refusal(draft))[0] is Status.FAILED_PRECONDITION


@pytest.mark.parametrize("version", ["", " "])
@over_asyncio
async def test_a_blank_version_is_refused_before_anything_happens(version):
    async with worker() as stand_in:
        trainer = Trainer(stand_in)
        await trainer.start()
        assert (await refusal(trainer.finish(version)))[0] is Status.INVALID_ARGUMENT
        await trainer.finish("7")
        label = stand_in.control.update_weight_version(vllm.UpdateWeightVersionRequest(weight_version=version))
        assert (await refusal(label))[0] is Status.INVALID_ARGUMENT
        assert await trainer.version() == "7"


@over_asyncio
async def test_a_list_over_http_has_one_object_for_each_rank():
    async with worker(world_size=2) as stand_in:
        assert (await stand_in.post("/init_weight_transfer_engine", {"init_info": INIT})).status_code == 200
        assert (await stand_in.post("/start_weight_update")).json() == {"message": "Weight update started"}
        assert (await stand_in.post("/update_weights", {"update_info": [NAMED, NAMED]})).json() == {"message": "Weights updated"}
        assert (await stand_in.post("/update_weights", {"update_info": [NAMED, None]})).status_code == 400
        finished = await stand_in.post("/finish_weight_update", {"weight_version": "3"})
        assert finished.json() == {"message": "Weight update finished"}
        await stand_in.post("/start_weight_update")
        assert (await stand_in.post("/update_weights", {"update_info": [NAMED]})).status_code == 500


@over_asyncio
async def test_a_frozen_call_goes_on_with_the_new_weights_and_says_which_made_which_token():
    async with worker(token_delay=0.001) as stand_in:
        sampling = {"max_tokens": 40, "temperature": 0}
        old = (await stand_in.generate_http(body(sampling=sampling)))["choices"][0]["token_ids"]
        call = asyncio.create_task(stand_in.generate_http(body(sampling=sampling)))
        while RUNNING not in (await stand_in.http.get("/metrics")).text:
            pass
        await stand_in.post("/pause", mode="keep")
        await Trainer(stand_in).whole("8")
        await stand_in.post("/resume")
        choice = (await call)["choices"][0]
        first, second = choice["weight_versions"]
        cut = first["end"]
        assert (first["version"], first["start"], second) == ("default", 0, {"version": "8", "start": cut, "end": 40})
        assert choice["token_ids"][:cut] == old[:cut]
        assert choice["token_ids"][cut:] != old[cut:]


@over_asyncio
async def test_a_forward_pass_on_meta_tensors_kills_the_engine_for_good():
    async with worker(token_delay=0.001) as stand_in:
        watch = stand_in.health.watch(HealthCheckRequest())
        assert (await anext(watch)).status is HealthCheckResponseServingStatus.SERVING
        running, _ = await begin(stand_in)
        await Trainer(stand_in).start()
        assert (await refusal(running))[0] is Status.INTERNAL
        assert (await refusal(stand_in.generate(request())))[0] is Status.INTERNAL
        assert (await anext(watch)).status is HealthCheckResponseServingStatus.NOT_SERVING
        for name in ("", "vllm.Inference", "vllm.Control"):
            check = await stand_in.health.check(HealthCheckRequest(service=name))
            assert check.status is HealthCheckResponseServingStatus.NOT_SERVING
        assert (await stand_in.http.get("/health")).status_code == 503
        assert (await stand_in.post("/inference/v1/generate", body())).status_code == 500
        assert (await refusal(stand_in.control.is_paused(vllm.IsPausedRequest())))[0] is Status.INTERNAL
        assert (await refusal(Trainer(stand_in).start()))[0] is Status.INTERNAL
        assert (await stand_in.control.get_server_info(vllm.GetServerInfoRequest())).api_version == "vllm"
        await cast("AsyncGenerator[object, None]", watch).aclose()


@over_asyncio
async def test_a_queued_call_does_not_touch_meta_tensors():
    async with worker() as stand_in:
        await stand_in.post("/pause", mode="keep")
        await Trainer(stand_in).init()
        await Trainer(stand_in).start()
        queued = asyncio.create_task(stand_in.tokens(request()))
        await Trainer(stand_in).update()
        await Trainer(stand_in).finish("1")
        await stand_in.post("/resume")
        assert len(await queued) == 4
