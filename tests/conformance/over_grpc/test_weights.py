"""A weight update step by step, and the version that labels the weights."""

import json
from contextlib import suppress

import pytest
import trio

from core.wire import GRPCError, Status
from core.wire.generated import vllm
from core.wire.generated.grpc.health import v1 as health
from tests import workers
from tests.conformance.over_grpc.client import client_of, refusal, request
from tests.conformance.over_grpc.coverage import exercises

INIT = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}
NOT_SERVING = health.HealthCheckResponseServingStatus.NOT_SERVING
UPDATE = {"names": ["w"], "dtype_names": ["float32"], "shapes": [[1]]}


class Steps:
    """The steps of an update, as calls."""

    def __init__(self, client):
        self._control = client.control

    async def init(self, info=None):
        data = json.dumps(INIT if info is None else info).encode()
        await self._control.init_weight_transfer_engine(vllm.InitWeightTransferEngineRequest(init_info_json=data))

    async def start(self):
        await self._control.start_weight_update(vllm.StartWeightUpdateRequest())

    async def update(self, info=None):
        data = json.dumps(UPDATE if info is None else info).encode()
        await self._control.update_weights(vllm.UpdateWeightsRequest(update_info_json=data))

    async def finish(self, version=None):
        await self._control.finish_weight_update(vllm.FinishWeightUpdateRequest(weight_version=version))

    async def version(self):
        return (await self._control.get_weight_version(vllm.GetWeightVersionRequest())).weight_version

    async def label(self, version):
        await self._control.update_weight_version(vllm.UpdateWeightVersionRequest(weight_version=version))


@pytest.fixture
async def client(current):
    """It runs afterwards, with its first weights and their first label."""
    yield current
    steps = Steps(current)
    with suppress(GRPCError):  # none is open
        await steps.finish()
    await trio.to_thread.run_sync(current.worker.order, "reload_weights")
    await steps.label("default")
    await resume(current)


@pytest.fixture
async def steps(client):
    """The steps on a worker that is paused."""
    await client.control.pause_generation(vllm.PauseGenerationRequest(mode=vllm.PauseMode.KEEP))
    return Steps(client)


async def resume(client):
    await client.control.resume_generation(vllm.ResumeGenerationRequest())


@exercises("Control.InitWeightTransferEngine", "InitWeightTransferEngineRequest.init_info_json", "Control.StartWeightUpdate")
@exercises("Control.UpdateWeights", "UpdateWeightsRequest.update_info_json", "Control.FinishWeightUpdate")
@exercises("FinishWeightUpdateRequest.weight_version", "Control.GetWeightVersion", "GetWeightVersionResponse.weight_version")
async def test_a_whole_update_changes_output_and_version(client, steps):
    await resume(client)
    before = await client.tokens(request(tokens=12))
    assert await steps.version() == "default"
    await client.control.pause_generation(vllm.PauseGenerationRequest())
    await steps.init()
    await steps.start()
    await steps.update()
    await steps.update(UPDATE | {"names": ["v"]})
    assert await steps.version() == "default", "published by the finish"
    await steps.finish("7")
    assert await steps.version() == "7"
    await resume(client)
    assert await client.tokens(request(tokens=12)) != before


async def test_the_same_update_gives_the_same_output_again(client, steps):
    outputs = []
    for version in ("1", "2", "1"):
        await steps.init()
        await steps.start()
        await steps.update(UPDATE | {"names": [version]})
        await steps.finish(version)
        await resume(client)
        outputs.append(await client.tokens(request(tokens=12)))
        await client.control.pause_generation(vllm.PauseGenerationRequest(mode=vllm.PauseMode.KEEP))
    assert outputs[0] == outputs[2] != outputs[1]


async def test_a_finish_without_a_version_leaves_the_label(client, steps):
    await steps.label("4")
    await steps.init()
    await steps.start()
    await steps.update()
    await steps.finish()
    assert await steps.version() == "4"


async def test_steps_out_of_turn_are_internal_errors_that_name_their_rpc(client, steps):
    for step, name in ((steps.update(), "update_weights"), (steps.finish(), "finish_weight_update")):
        status, message = await refusal(step)
        assert status is Status.INTERNAL
        assert name in message
    await steps.start()
    status, message = await refusal(steps.start())
    assert (status, "start_weight_update" in message) == (Status.INTERNAL, True)


async def test_a_failed_update_leaves_no_update_open(client, steps):
    await steps.init()
    await steps.start()
    assert (await refusal(steps.update({}) if client.worker.kind == "stand-in" else _failing(client, steps)))[0] is Status.INTERNAL
    assert (await refusal(steps.finish("8")))[0] is Status.INTERNAL
    assert await steps.version() == "default"
    await steps.start()
    await steps.update()
    await steps.finish("9")
    await resume(client)
    assert (await client.generate(request())).outputs.num_tokens == 4


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"1"])
async def test_what_is_no_json_object_is_an_invalid_argument(client, steps, data):
    for call in (
        client.control.init_weight_transfer_engine(vllm.InitWeightTransferEngineRequest(init_info_json=data)),
        client.control.update_weights(vllm.UpdateWeightsRequest(update_info_json=data)),
    ):
        assert (await refusal(call))[0] is Status.INVALID_ARGUMENT


@pytest.mark.parametrize("blank", ["", "  "])
async def test_a_blank_version_is_refused_before_anything_happens(client, steps, blank):
    await steps.init()
    await steps.start()
    await steps.update()
    assert (await refusal(steps.finish(blank)))[0] is Status.INVALID_ARGUMENT
    await steps.finish("5")
    assert await steps.version() == "5"


@exercises("Control.StartDraftWeightUpdate")
async def test_a_draft_update_needs_a_draft_model(client, steps):
    call = client.control.start_draft_weight_update(vllm.StartDraftWeightUpdateRequest())
    assert (await refusal(call))[0] is Status.FAILED_PRECONDITION


@exercises("Control.UpdateWeightVersion", "UpdateWeightVersionRequest.weight_version")
async def test_the_label_alone_can_be_set(worker, seen):
    async with client_of(worker, seen) as client:
        steps = Steps(client)
        await steps.label("step-12")
        assert await steps.version() == "step-12"
        assert (await refusal(steps.label(" ")))[0] is Status.INVALID_ARGUMENT
        await steps.label("default")


async def test_without_weight_transfer_every_step_is_refused(seen):
    with workers.scripted(weight_transfer="") as worker:
        async with client_of(worker, seen) as client:
            await _all_refused(client)


async def test_the_real_engine_has_no_weight_transfer(engine_worker, seen):
    async with client_of(engine_worker, seen) as client:
        await _all_refused(client)


@pytest.mark.parametrize("start", [workers.stand_in, pytest.param(workers.scripted, marks=pytest.mark.real)], ids=["stand-in", "scripted"])
async def test_a_forward_pass_while_an_update_is_open_kills_the_engine(start, seen):
    with start() as worker:
        async with client_of(worker, seen) as client:
            await Steps(client).start()
            assert await refusal(client.generate(request())) == (
                Status.INTERNAL,
                "engine-core error: engine core reported fatal failure",
            )
            with trio.fail_after(10):  # vllm-rs takes a moment to notice
                while (await client.health.check(health.HealthCheckRequest())).status != NOT_SERVING:  # noqa: ASYNC110 - it has to be asked
                    await trio.sleep(0.01)
            assert (await refusal(client.generate(request())))[0] is Status.INTERNAL


async def _all_refused(client):
    steps = Steps(client)
    for step in (steps.init(), steps.start(), steps.update(), steps.finish("1")):
        assert (await refusal(step))[0] is Status.FAILED_PRECONDITION


async def _failing(client, steps):
    client.worker.order("script_fail", "update_weights")
    await steps.update()
