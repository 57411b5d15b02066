"""The transport as the core uses it: what it takes of a request, and what the workers are asked."""

from typing import Any

import httpx
import msgspec
import pytest

from core import BadRequest
from core.fleet.progress import Update, UpdateRequest
from plugins.weights_nixl.plugin import NixlTransport, Settings, WeightsNixl
from tests.unit.core.engines import AdministeredFleet, administered, serve_http

OPTIONS: dict[str, Any] = {
    "agent": "bml4bA==",
    "memory": "VRAM",
    "tensors": [["w", "bfloat16", [2, 3], 140_000_000_000_000, 1], ["scalar", "float32", [], 4096, 0]],
}


async def updated(fleet: AdministeredFleet) -> Update:
    """An update to version 7, when it has ended."""
    update = fleet.administration.updates.ask(UpdateRequest("7", "nixl", OPTIONS), fleet.administration.workers(), by="me")
    await update.done.wait()
    return update


async def test_every_worker_is_asked_to_read_what_the_trainer_offers():
    (transport,) = WeightsNixl(Settings(chunk_mib=2, timeout=7.0)).weight_transports()
    async with administered(2, 1, transports=[transport]) as fleet:
        asked = [serve_http(worker, {"results": [1000] * worker.world_size}) for worker in fleet.workers]
        update = await updated(fleet)
    kwargs = {**OPTIONS, "chunk_bytes": 2 << 20, "timeout": 7.0}
    assert asked == [[{"method": "pull_weights_nixl", "kwargs": kwargs}]] * 2
    assert update.failure is None
    assert [engine.version for engine in fleet.engines] == ["7", "7"]


async def test_a_worker_without_the_extension_is_named_and_the_other_one_goes_on():
    async with administered(transports=[NixlTransport(Settings())]) as fleet:
        error = {"error": {"message": "no attribute 'pull_weights_nixl'", "type": "server_error", "param": None, "code": 500}}
        serve_http(fleet.workers[0], lambda _: httpx.Response(500, json=error))
        serve_http(fleet.workers[1], {"results": [1000]})
        update = await updated(fleet)
        assert "w0: it has no pull_weights_nixl: start its engine with --worker-extension-cls plugins.weights_nixl" in str(update.failure)
        assert fleet.states == ["quarantined", "ready"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"agent": "not base64!"}, "agent"),
        ({"agent": ""}, "agent"),
        ({"memory": "FILE"}, "memory"),
        ({"tensors": []}, "tensors"),
        ({"tensors": [["w", "float32", [2, -1], 4096, 0]]}, "tensors[0][2][1]"),
        ({"tensors": [["w", "float32", [2], "4096", 0]]}, "tensors[0][3]"),
        ({"tensors": [["w", "float32", [2], 4096]]}, "tensors[0]"),
        ({"tensors": [["w", "float32", [2], 4096, 0]] * 2}, "tensors"),
        ({"path": "/weights"}, "path"),
    ],
)
def test_what_is_no_offer_is_refused_by_name(change: dict[str, Any], param: str | None):
    with pytest.raises(BadRequest) as refused:
        NixlTransport(Settings()).parse({**OPTIONS, **change})
    assert refused.value.param == param


@pytest.mark.parametrize("key", OPTIONS)
def test_every_key_is_needed(key: str):
    with pytest.raises(BadRequest, match=f"{key}: this field is required"):
        NixlTransport(Settings()).parse({name: value for name, value in OPTIONS.items() if name != key})


def test_it_needs_the_trainer_each_time():
    assert not NixlTransport(Settings()).repeatable


@pytest.mark.parametrize("settings", [{"chunk_mib": 0}, {"timeout": 0}])
def test_settings_that_would_never_read_anything_are_refused(settings: dict[str, Any]):
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(settings, Settings)
