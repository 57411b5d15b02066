"""What a worker has made of pictures with its old weights doesn't outlive them, in whatever way the new ones come."""

from collections.abc import Awaitable, Callable

import httpx
import pytest
from msgspec.structs import replace

from core.fleet.progress import UpdateRequest
from core.fleet.worker import Worker
from tests.unit.core.engines import AdministeredFleet, administered
from tests.unit.core.transports import Courier

RESET = "/reset_encoder_cache"


def seeing(worker: Worker, status: int = 200) -> list[str]:
    """Make it one with a model that sees; what its HTTP server is asked, which answers the reset with this status."""
    assert worker.info
    worker.info = replace(worker.info, supports_multimodal=True)
    return asked_over_http(worker, status)


def asked_over_http(worker: Worker, status: int = 200) -> list[str]:
    paths: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        paths.append(request.url.path)
        return httpx.Response(status if request.url.path == RESET else 200, json={"results": [None]})

    worker.http = httpx.AsyncClient(base_url="http://w", transport=httpx.MockTransport(answer))
    return paths


async def by_transaction(fleet: AdministeredFleet) -> None:
    update = fleet.administration.updates.ask(UpdateRequest("8", "courier", {}), fleet.workers, by="me")
    await update.done.wait()


async def by_the_trainers_own_steps(fleet: AdministeredFleet) -> None:
    await fleet.update("8")


async def by_reload(fleet: AdministeredFleet) -> None:
    await fleet.methods.call(fleet.workers, {"method": "reload_weights"}, by="me")


WAYS = [by_transaction, by_the_trainers_own_steps, by_reload]


@pytest.mark.parametrize("way", WAYS)
async def test_a_worker_that_sees_forgets_and_another_is_not_asked(way: Callable[[AdministeredFleet], Awaitable[None]]):
    async with administered(transports=[Courier()]) as fleet:
        asked = [seeing(fleet.workers[0]), asked_over_http(fleet.workers[1])]
        await way(fleet)
        assert [paths.count(RESET) for paths in asked] == [1, 0]
        assert fleet.states == ["ready", "ready"]


async def test_what_replaces_no_weights_lets_nothing_be_forgotten():
    async with administered() as fleet:
        asked = seeing(fleet.workers[0])
        asked_over_http(fleet.workers[1])
        await fleet.methods.call(fleet.workers, {"method": "profile"}, by="me")
        assert asked == ["/collective_rpc"]


async def test_a_worker_that_cannot_forget_is_quarantined():
    async with administered(transports=[Courier()]) as fleet:
        seeing(fleet.workers[0], status=500)
        await by_transaction(fleet)
        assert fleet.states == ["quarantined", "ready"]


@pytest.mark.parametrize("way", [by_transaction, by_the_trainers_own_steps])
async def test_a_server_without_the_route_is_warned_of_and_goes_on(way: Callable[[AdministeredFleet], Awaitable[None]], capsys):
    async with administered(transports=[Courier()]) as fleet:
        assert fleet.workers[0].info

        def no_route(_: httpx.Request) -> httpx.Response:
            return httpx.Response(404)

        seeing(fleet.workers[0])
        fleet.workers[0].http = httpx.AsyncClient(base_url="http://w", transport=httpx.MockTransport(no_route))
        await way(fleet)
        assert fleet.states == ["ready", "ready"]
    assert "worker.encoded_media_kept" in capsys.readouterr().out
