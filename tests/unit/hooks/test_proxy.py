"""The hooks beside calls, as plugins see them: what headrace serves and runs."""

import pytest
import trio
from prometheus_client import CollectorRegistry, Counter
from trio.testing import wait_all_tasks_blocked

from core.errors import PluginFault
from core.hookspecs import hookimpl
from core.northbound.models import ModelCard
from core.proxy import Proxy
from core.routes import HTTPReply, HTTPRequest, Routes
from tests.unit.core.rig import make_worker
from tests.unit.hooks.proxies import get, move


async def test_hook_register_routes(opened):
    class Plugin:
        @hookimpl
        def register_routes(self, routes: Routes, proxy: Proxy) -> None:
            async def count(request: HTTPRequest) -> HTTPReply:
                return HTTPReply.json({"workers": len(proxy.fleet.workers), "path": request.path})

            routes.add("GET", "/count", count)

    async with opened(Plugin()) as proxy:
        browser = await get(proxy, "/count")
    assert (browser.status, browser.json) == (200, {"workers": 0, "path": "/count"})


async def test_hook_register_routes_has_the_plugin_to_blame_for_its_handlers(opened):
    class Plugin:
        @hookimpl
        def register_routes(self, routes: Routes) -> None:
            async def leave(request: HTTPRequest) -> HTTPReply:
                raise SystemExit(2)

            routes.add("GET", "/leave", leave)

    async with opened(Plugin()) as proxy:
        browser = await get(proxy, "/leave")
        assert (browser.status, browser.json["error"]["message"]) == (500, "plugin 'plugin' failed in GET /leave: SystemExit")
        assert (await get(proxy, "/live")).status == 200


@pytest.mark.parametrize("hook", ["run_service", "weight_transports", "register_routes", "collect_metrics"])
async def test_a_hook_that_fails_at_the_start_ends_it_with_the_name_of_its_plugin(opened, hook):
    def fail(self) -> None:
        raise SystemExit(2)

    with pytest.raises(PluginFault, match=f"plugin 'plugin' failed in {hook}: SystemExit"):
        async with opened(type("Plugin", (), {hook: hookimpl(fail)})()):
            pytest.fail("it has started")


async def test_hook_list_models(opened):
    class Plugin:
        @hookimpl
        def list_models(self):
            return [
                ModelCard(id="math", parent="tiny", root="/math"),
                ModelCard(id="tiny", parent="x"),
                ModelCard(id="long", max_model_len=7),
            ]

    async with opened(Plugin()) as proxy:
        move(proxy.fleet, make_worker("w", state="starting"), "ready")
        cards = (await get(proxy, "/v1/models")).json["data"]
    told = [(card["id"], card["parent"], card["root"], card["max_model_len"]) for card in cards]
    assert told == [("tiny", None, "tiny", 100), ("math", "tiny", "/math", 100), ("long", None, None, 7)]


async def test_hook_explain_unready(opened):
    class Plugin:
        @hookimpl
        def explain_unready(self, model: str, workers):
            return f"{model}: no judge for {', '.join(worker.id for worker in workers)}" if model == "tiny" else None

    async with opened(Plugin()) as proxy:
        tiny, part = make_worker("a", state="starting"), make_worker("b", state="starting", role="prefill")
        for worker, state in ((tiny, "paused"), (part, "ready")):
            move(proxy.fleet, worker, state)
        browser = await get(proxy, "/ready")
        assert (browser.status, browser.json["error"]["message"]) == (503, "tiny: no judge for a, b")
        move(proxy.fleet, make_worker("c", state="starting", models=("other",)), "ready")
        assert (await get(proxy, "/ready")).status == 200


async def test_hook_run_service(opened):
    seen = []

    class Plugin:
        @hookimpl
        def run_service(self, proxy: Proxy):
            async def service() -> None:
                seen.append(proxy)
                try:
                    await trio.sleep_forever()
                finally:
                    seen.append("ended")

            return service

    async with opened(Plugin()) as proxy:
        await wait_all_tasks_blocked()
        assert seen == [proxy]
    assert seen == [proxy, "ended"]


@pytest.mark.parametrize("error", [ValueError("mine"), SystemExit(2)])
async def test_hook_run_service_that_fails_leaves_the_proxy_running(opened, error):
    class Plugin:
        @hookimpl
        def run_service(self, proxy: Proxy):
            async def service() -> None:
                raise error

            return service

    async with opened(Plugin()) as proxy:
        await wait_all_tasks_blocked()
        assert (await get(proxy, "/live")).status == 200


async def test_hook_session_finished(opened):
    seen = []

    class Plugin:
        @hookimpl
        def session_finished(self, session_id: str) -> None:
            seen.append(session_id)
            raise LookupError("mine; the others are told all the same, and who tells it hears nothing of it")

    async with opened(Plugin()) as proxy:
        proxy.finish_session("trace-1")
        proxy.finish_session("trace-1")
    assert seen == ["trace-1", "trace-1"]


async def test_hook_collect_metrics(opened):
    class Plugin:
        @hookimpl
        def collect_metrics(self, registry: CollectorRegistry) -> None:
            Counter("headrace_my_hits", "Calls whose session was known", registry=registry).inc(3)

    async with opened(Plugin()) as proxy:
        browser = await get(proxy, "/metrics")
    assert b"headrace_my_hits_total 3.0" in browser.raw
