"""grpc.health.v1."""

import pytest

from core.wire import Status
from core.wire.generated.grpc.health.v1 import HealthCheckRequest, HealthCheckResponse, HealthCheckResponseServingStatus
from tests import workers
from tests.conformance.over_grpc.client import client_of, refusal, request
from tests.conformance.over_grpc.coverage import exercises

SERVING, NOT_SERVING = HealthCheckResponseServingStatus.SERVING, HealthCheckResponseServingStatus.NOT_SERVING
NAMES = ["", "vllm.Inference", "vllm.Control"]


@exercises("Health.Check", "HealthCheckRequest.service", "HealthCheckResponse.status")
async def test_every_service_is_serving(client):
    for name in NAMES:
        assert await client.health.check(HealthCheckRequest(service=name)) == HealthCheckResponse(status=SERVING)


async def test_an_unknown_service_is_not_found(client):
    assert (await refusal(client.health.check(HealthCheckRequest(service="vllm.Nope"))))[0] is Status.NOT_FOUND
    assert (await refusal(_watched(client, "vllm.Nope")))[0] is Status.NOT_FOUND, "the standard says SERVICE_UNKNOWN"


@exercises("Health.Watch")
@pytest.mark.parametrize("name", NAMES)
async def test_watch_tells_the_state_at_once_and_stays_open(client, name):
    async with client.watching(name) as replies:
        assert (await replies.recv_message()).status == SERVING


async def test_the_death_of_the_engine_is_told_to_who_watches(seen):
    with workers.scripted() as worker:
        async with client_of(worker, seen) as client, client.watching() as replies:
            assert (await replies.recv_message()).status == SERVING
            assert (await refusal(client.generate(request(prompt=[15]))))[0] is Status.INTERNAL
            assert (await replies.recv_message()).status == NOT_SERVING


async def test_there_is_no_list(client):
    call = client.channel.unary("/grpc.health.v1.Health/List", HealthCheckResponse, HealthCheckRequest())
    assert (await refusal(call))[0] is Status.UNIMPLEMENTED


async def _watched(client, name):
    return [reply async for reply in client.health.watch(HealthCheckRequest(service=name))]
