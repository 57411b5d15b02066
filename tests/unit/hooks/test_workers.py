"""The hooks for workers and their weights, as plugins see them."""

from collections.abc import Mapping, Sequence
from typing import Any

import trio

from core.fleet.cohort import Cohort
from core.fleet.worker import Worker
from core.hookspecs import hookimpl
from core.proxy import Proxy, open_proxy
from core.registry import Loaded, Registry
from core.settings import parse_settings
from plugins.routing_round_robin import RoundRobin
from plugins.stand_in import Settings as StandInSettings
from plugins.stand_in import StandIn
from tests.unit.core.engines import AdministeredFleet, Engine, serve_http
from tests.unit.core.rig import make_worker
from tests.unit.hooks.proxies import ask, fleet_of, move


async def test_hook_prepare_worker():
    prepared = []
    joined = trio.Event()

    class Plugin:
        @hookimpl
        async def prepare_worker(self, worker: Worker) -> None:
            prepared.append((worker.id, worker.state, worker.reason))
            if len(prepared) == 1:
                raise LookupError("its adapter isn't there yet")

        @hookimpl
        def worker_joined(self) -> None:
            joined.set()

    plugins = {"preparing": Plugin(), "stand-in": StandIn(StandInSettings()), "round-robin": RoundRobin()}
    registry = Registry([Loaded(name, plugin) for name, plugin in plugins.items()], ["round-robin"])
    async with open_proxy(parse_settings("probe.interval = 0.05"), registry):
        await joined.wait()
    assert prepared == [
        ("stand-in-0", "starting", "not probed yet"),
        ("stand-in-0", "starting", "plugin 'preparing' failed in prepare_worker: LookupError: its adapter isn't there yet"),
    ]


async def test_hook_weight_transports(opened):
    class Reload:
        name = "reload"

    class Plugin:
        @hookimpl
        def weight_transports(self):
            return [Reload()]

    async with opened(Plugin()) as proxy:
        assert [*proxy.administration.updates.transports] == ["reload"]


async def test_hook_worker_joined(opened):
    seen = []

    class Plugin:
        @hookimpl
        def worker_joined(self, worker: Worker) -> None:
            seen.append((worker, fleet_of(opening).ready))

    worker = make_worker("w", state="starting")
    async with opened(Plugin()) as opening:
        move(opening.fleet, worker, "ready")
        move(opening.fleet, worker, "paused")
        move(opening.fleet, worker, "ready")
        assert seen == [(worker, ())]  # it was told before the worker could get a call
        move(opening.fleet, worker, "gone")
        move(opening.fleet, worker, "paused")
    assert [entry[0] for entry in seen] == [worker, worker]


async def test_hook_worker_left(opened):
    seen = []

    class Plugin:
        @hookimpl
        def worker_left(self, worker: Worker) -> None:
            seen.append((worker, fleet_of(opening).ready))

    worker = make_worker("w", state="starting")
    async with opened(Plugin()) as opening:
        move(opening.fleet, worker, "ready")
        move(opening.fleet, worker, "gone")
        move(opening.fleet, worker, "gone")
    assert seen == [(worker, ())]  # it was told when the worker could get no more calls


async def test_hook_translate_weight_update(opened):
    seen = []

    class Plugin:
        @hookimpl
        def translate_weight_update(self, body: Mapping[str, Any], workers: Sequence[Worker]) -> Mapping[str, Any] | None:
            seen.append((body, [worker.id for worker in workers]))
            if "folder" not in body:
                return None
            return {"method": "reload_weights", "kwargs": {"weights_path": body["folder"]}, "weight_version": "7"}

    async with opened(Plugin()) as proxy:
        engine, called = join(proxy, "a")
        assert (await ask(proxy, "/update_weights", {"folder": "/w"})).json == {"status": "ok"}
        refused = await ask(proxy, "/update_weights", {"fodler": "/w"})
        assert (await ask(proxy, "/update_weights", {"update_info": {}})).status == 409, "vLLM's own, without a start"
    assert seen == [({"folder": "/w"}, ["a"]), ({"fodler": "/w"}, ["a"])]
    assert called == [{"method": "reload_weights", "kwargs": {"weights_path": "/w"}}]
    assert engine.version == "7"
    assert (refused.status, refused.json["error"]["message"]) == (400, "fodler: there is no such key here; known are update_info")


async def test_hook_number_ranks(opened):
    seen = []

    class Plugin:
        @hookimpl
        def number_ranks(self, body: Mapping[str, Any], cohort: Cohort, index: int) -> Mapping[str, Any] | None:
            seen.append((body["method"], cohort.ranks, index))
            if body["method"] != "meet":
                return None
            return {**body, "kwargs": {"first_rank": cohort.members[index].offset}}

    async with opened(Plugin()) as proxy:
        (_, first), (_, second) = join(proxy, "a"), join(proxy, "b")
        for path in ("/collective_rpc", "/workers/b/collective_rpc"):
            for method in ("meet", "wave"):
                assert (await ask(proxy, path, {"method": method})).status == 200
    assert seen == [("meet", 2, 0), ("meet", 2, 1), ("wave", 2, 0), ("wave", 2, 1)]
    assert first == [{"method": "meet", "kwargs": {"first_rank": 0}}, {"method": "wave"}]
    assert second == [{"method": "meet", "kwargs": {"first_rank": 1}}, {"method": "wave"}, {"method": "meet"}, {"method": "wave"}]


def join(proxy: Proxy, name: str) -> tuple[Engine, list[Any]]:
    """Let a worker join; its engine, and the bodies of its `/collective_rpc`."""
    engine = Engine()
    worker = AdministeredFleet.make(name, engine)
    worker.state = "starting"
    move(proxy.fleet, worker, "ready")
    return engine, serve_http(worker, {"results": [None]})
