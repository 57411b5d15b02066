"""The hooks, as plugins see them: each runs with its exact arguments, and its spec says all that there is to know.

The second half walks the specs, so that a new hook without documentation, example or test fails here.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Awaitable, Mapping
from typing import Any

import pytest
import trio
from msgspec.structs import replace
from prometheus_client import CollectorRegistry, Counter
from trio.testing import wait_all_tasks_blocked

from core import proxy as proxy_module
from core.call import Call, Identity, Outcome
from core.errors import CallError, PluginFault, WorkerLost
from core.fleet.cohort import Cohort
from core.fleet.fleet import Fleet
from core.fleet.worker import Worker
from core.hookspecs import HOOKS, Choice, HookSpecs, hookimpl
from core.northbound.models import ModelCard
from core.proxy import Proxy, open_proxy
from core.registry import Loaded, Registry
from core.reply import GenerateReply, Output
from core.routes import HTTPReply, HTTPRequest, Routes
from core.settings import Settings, parse_settings
from core.wire.generated.inference_pb2 import GenerateRequest
from plugins.routing_round_robin import RoundRobin
from plugins.stand_in import Settings as StandInSettings
from plugins.stand_in import StandIn
from tests.unit.core.engines import AdministeredFleet, Engine, serve_http
from tests.unit.core.lanes import ScriptedLane, output
from tests.unit.core.rig import Browser, Rig, make_worker

BODY = {"token_ids": [1, 2, 3], "sampling_params": {}, "request_id": "r1", "cache_salt": "v7"}


async def test_hook_receive_call():
    calls = []

    class Plugin:
        @hookimpl
        def receive_call(self, call: Call) -> None:
            calls.append((call, call.identity))
            call.cache_salt = "v8"

    lane = ScriptedLane([output(7, finish="stop")])
    await Browser(BODY).ask(Rig(make_worker("a", lane), plugins=[Plugin()]))
    [(call, identity)] = calls
    assert (call.id, call.token_ids, identity) == ("r1", [1, 2, 3], Identity())
    assert lane.requests[0].kv.cache_salt == "v8"


async def test_hook_prepare_call():
    steps = []

    class Plugin:
        @hookimpl
        def receive_call(self, call: Call) -> None:
            steps.append("received")

        @hookimpl
        def prepare_call(self, call: Call) -> Awaitable[None] | None:
            return self.fetch(call) if "prompt_uri" in call.unclaimed else None

        @hookimpl
        def identify_call(self, call: Call) -> None:
            steps.append("identified")

        async def fetch(self, call: Call) -> None:
            await trio.lowlevel.checkpoint()
            steps.append("prepared")
            del call.unclaimed["prompt_uri"]
            call.token_ids = [5, 6]

    lane = ScriptedLane([output(7, finish="stop")])
    rig = Rig(make_worker("a", lane), plugins=[Plugin()])
    await Browser({**BODY, "prompt_uri": "store://1"}).ask(rig)
    await Browser(BODY).ask(rig)
    assert steps == ["received", "prepared", "identified", "received", "identified"]
    assert [list(request.token_ids.ids) for request in lane.requests] == [[5, 6], [1, 2, 3]]


async def test_hook_begin_attempt(opened):
    heads = []

    class Plugin:
        @hookimpl
        def run_service(self, proxy: Proxy) -> None:
            self.proxy = proxy

        @hookimpl
        def begin_attempt(self, call: Call) -> Awaitable[Call | None] | None:
            return self.begin(call) if call.cache_salt else None

        async def begin(self, call: Call) -> Call:
            reply, outcome = await self.proxy.leg(replace(call, token_ids=call.token_ids[:2], role="prefill"))
            heads.append((reply.choices[0].token_ids, outcome.worker, outcome.prompt_tokens))
            return replace(call, kv_transfer_params={"from": outcome.worker}, legs=(f"prefill={outcome.worker}",))

    prefill, decode = ScriptedLane([output(5, finish="length", prompt=2)]), ScriptedLane([output(7, finish="stop")])
    async with opened(Plugin()) as proxy:
        move(proxy.fleet, make_worker("p", prefill, role="prefill", state="starting"), "ready")
        move(proxy.fleet, make_worker("d", decode, state="starting"), "ready")
        browser = await ask(proxy, "/inference/v1/generate", BODY)
        await ask(proxy, "/inference/v1/generate", {**BODY, "cache_salt": None})
    assert heads == [([5], "p", 2)]
    assert list(prefill.requests[0].token_ids.ids) == [1, 2]
    assert [dict(request.kv.kv_transfer_params.items()) for request in decode.requests] == [{"from": "p"}, {}]
    assert (browser.headers["x-headrace-worker"], browser.headers["x-headrace-route"]) == ("d", "prefill=p, aggregated=d (round-robin)")


async def test_hook_explain_attempt(opened):
    class Plugin:
        @hookimpl
        def explain_attempt(self, call: Call) -> list[str] | None:
            if call.cache_salt == "broken":
                raise LookupError
            return [f"warm-up of {len(call.token_ids)} tokens"] if call.cache_salt else None

    async with opened(Plugin()) as proxy:
        move(proxy.fleet, make_worker("a", ScriptedLane([output(7, finish="stop")]), state="starting"), "ready")
        answers = [await ask(proxy, "/fleet/route", {**BODY, "cache_salt": salt}) for salt in ("v7", None, "broken")]
    assert [answer.json["legs"] for answer in answers] == [["warm-up of 3 tokens"], [], ["plugin fails: LookupError"]]
    assert all(answer.json["choice"]["worker"] == "a" for answer in answers)


async def test_hook_prepare_call_refuses_a_call_and_its_fault_is_named():
    class Plugin:
        @hookimpl
        async def prepare_call(self, call: Call) -> None:
            raise CallError(413, "too long") if call.cache_salt else LookupError("lost")

    rig = Rig(make_worker("a", ScriptedLane()), plugins=[Plugin()])
    assert (await Browser(BODY).ask(rig)).status == 413
    browser = await Browser({"token_ids": [1], "sampling_params": {}}).ask(rig)
    assert (browser.status, browser.json["error"]["message"]) == (500, "plugin 'p0' failed in prepare_call: LookupError")


async def test_hook_prepare_call_is_cancelled_when_the_client_goes():
    ended = trio.Event()

    class Plugin:
        @hookimpl
        async def prepare_call(self, call: Call) -> None:
            try:
                await trio.sleep_forever()
            finally:
                ended.set()

    rig = Rig(make_worker("a", ScriptedLane()), plugins=[Plugin()])
    browser = Browser(BODY)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(browser.ask, rig)
        await wait_all_tasks_blocked()
        browser.gone.set()
        await ended.wait()
    assert rig.outcome.kind == "client-gone"


async def test_hook_identify_call():
    seen = []

    class Plugin:
        @hookimpl
        def receive_call(self, call: Call) -> None:
            call.adapter = "math"

        @hookimpl
        def identify_call(self, call: Call) -> None:
            seen.append(call.identity)
            call.identity = replace(call.identity, namespace="me.v7", media=("image",))

        @hookimpl
        def eligible_workers(self, call: Call) -> None:
            seen.append(call.identity)

    lane = ScriptedLane([output(7, finish="stop")])
    await Browser(BODY).ask(Rig(make_worker("a", lane), plugins=[Plugin()]))
    assert seen == [Identity("v7", "math"), Identity("me.v7", "math", ("image",))]
    assert lane.requests[0].kv.cache_salt == "me.v7"


async def test_hook_eligible_workers():
    seen = []

    class Plugin:
        @hookimpl
        def eligible_workers(self, call: Call, workers):
            seen.append((call.id, [worker.id for worker in workers]))
            return workers[1:]

    lanes = [ScriptedLane([output(7, finish="stop")]) for _ in range(3)]
    rig = Rig(*(make_worker(name, lane) for name, lane in zip("abc", lanes, strict=True)), plugins=[Plugin()])
    browsers = [await Browser(BODY).ask(rig) for _ in range(4)]
    assert seen == [("r1", ["a", "b", "c"])] * 4
    assert [browser.headers["x-headrace-worker"] for browser in browsers] == ["b", "c", "b", "c"]


async def test_hook_choose_worker():
    seen = []

    class Plugin:
        @hookimpl
        def choose_worker(self, call: Call, workers) -> Choice:
            seen.append((call.id, [worker.id for worker in workers]))
            return Choice(workers[-1], "the last")

    rig = Rig(
        make_worker("a", ScriptedLane([])),
        make_worker("b", ScriptedLane([output(7, finish="stop")])),
        plugins=[Plugin()],
        policies=["p0", "round-robin"],
    )
    browser = await Browser(BODY).ask(rig)
    assert seen == [("r1", ["a", "b"])]
    assert (browser.headers["x-headrace-worker"], browser.headers["x-headrace-route"]) == ("b", "the last")


class Attempts:
    """Notes the attempts of calls, and is a policy that always takes the first worker."""

    def __init__(self) -> None:
        self.seen: list[object] = []

    @hookimpl
    def choose_worker(self, workers) -> Choice:
        return Choice(workers[0], "the first")

    @hookimpl
    def attempt_started(self, call: Call, choice: Choice) -> None:
        self.seen.append(("started", call.id, choice.worker.id, choice.reason))

    @hookimpl
    def attempt_ended(self, call: Call, choice: Choice, output_tokens: int) -> None:
        self.seen.append(("ended", call.id, choice.worker.id, output_tokens))


@pytest.mark.parametrize("stream", [False, True])
async def test_hook_attempt_started_and_attempt_ended(stream):
    plugin = Attempts()
    workers = (make_worker("a", ScriptedLane([WorkerLost("gone")])), make_worker("b", ScriptedLane([output(7, finish="stop")])))
    await Browser({**BODY, "stream": stream}).ask(Rig(*workers, plugins=[plugin], policies=["p0"]))
    assert plugin.seen == [
        ("started", "r1", "a", "the first"),
        ("ended", "r1", "a", 0),
        ("started", "r1", "b", "the first"),
        ("ended", "r1", "b", 1),
    ]


async def test_hook_attempt_ended_for_a_client_that_has_gone():
    plugin = Attempts()
    rig = Rig(make_worker("a", ScriptedLane([output(7), trio.Event()])), plugins=[plugin], policies=["p0"])
    browser = Browser({**BODY, "stream": True})
    async with trio.open_nursery() as nursery:
        nursery.start_soon(browser.ask, rig)
        await wait_all_tasks_blocked()
        assert plugin.seen == [("started", "r1", "a", "the first")]
        browser.gone.set()
    assert plugin.seen[1:] == [("ended", "r1", "a", 1)]


async def test_hook_lower_call():
    seen = []

    class Plugin:
        @hookimpl
        def lower_call(self, call: Call, worker: Worker, request) -> None:
            seen.append((call.id, worker.id, request))
            request.priority += 10

    lane = ScriptedLane([output(7, finish="stop")])
    await Browser({**BODY, "sampling_params": {"n": 2}}).ask(Rig(make_worker("a", lane), plugins=[Plugin()]))
    assert [entry[:2] for entry in seen] == [("r1", "a")] * 2
    assert all(isinstance(request, GenerateRequest) for *_, request in seen)
    assert [request.priority for request in lane.requests] == [10, 10]


async def test_hook_lift_output():
    seen = []

    class Plugin:
        @hookimpl
        def lift_output(self, call: Call, output: Output) -> None:
            seen.append((call.id, list(output.choice.token_ids)))
            output.choice.stop_reason = "lifted"

    rig = Rig(make_worker("a", ScriptedLane([output(7), output(8, finish="stop")])), plugins=[Plugin()])
    browser = await Browser({**BODY, "stream": True}).ask(rig)
    assert seen == [("r1", [7]), ("r1", [8])]
    assert [event["choices"][0]["stop_reason"] for event in browser.events[:-1]] == ["lifted"] * 2


async def test_hook_lift_result():
    seen = []

    class Plugin:
        @hookimpl
        def lift_result(self, call: Call, result: GenerateReply) -> None:
            seen.append((call.id, [choice.token_ids for choice in result.choices]))
            result.metrics = {"mine": 1}

    rig = Rig(make_worker("a", ScriptedLane([output(7, finish="stop")])), plugins=[Plugin()])
    browser = await Browser(BODY).ask(rig)
    assert seen == [("r1", [[7]])]
    assert browser.json["metrics"] == {"mine": 1}


async def test_hook_call_settled():
    seen = []

    class Plugin:
        @hookimpl
        def call_settled(self, call: Call, outcome: Outcome) -> None:
            seen.append((call.id, outcome.kind, outcome.output_tokens, browser.complete))

    rig = Rig(make_worker("a", ScriptedLane([output(7, finish="stop")])), plugins=[Plugin()])
    browser = Browser(BODY)
    await browser.ask(rig)
    assert seen == [("r1", "ok", 1, True)]


@pytest.fixture
def opened(monkeypatch):
    """Opens a proxy without workers around one plugin; the log's set-up is the process's, so it stays as it is."""
    monkeypatch.setattr(proxy_module, "configure_log", lambda _: None)
    return lambda plugin: open_proxy(Settings(), Registry([Loaded("round-robin", RoundRobin()), Loaded("plugin", plugin)], ["round-robin"]))


async def get(proxy: Proxy, path: str) -> Browser:
    return await ask(proxy, path, b"", method="GET")


async def ask(proxy: Proxy, path: str, body: Any, *, method: str = "POST") -> Browser:
    browser = Browser(body, method=method)
    scope = {
        **browser.scope,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "http_version": "1.1",
        "scheme": "http",
        "root_path": "",
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "extensions": {},
    }
    await proxy.asgi(scope, browser.receive, browser.send)
    return browser


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
        def translate_weight_update(self, body: Mapping[str, Any]) -> Mapping[str, Any] | None:
            seen.append(body)
            if "folder" not in body:
                return None
            return {"method": "reload_weights", "kwargs": {"weights_path": body["folder"]}, "weight_version": "7"}

    async with opened(Plugin()) as proxy:
        engine, called = join(proxy, "a")
        assert (await ask(proxy, "/update_weights", {"folder": "/w"})).json == {"status": "ok"}
        refused = await ask(proxy, "/update_weights", {"fodler": "/w"})
        assert (await ask(proxy, "/update_weights", {"update_info": {}})).status == 409, "vLLM's own, without a start"
    assert seen == [{"folder": "/w"}, {"fodler": "/w"}]
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


def fleet_of(proxy: Proxy) -> Fleet:
    return proxy.fleet


def move(fleet: Fleet, worker: Worker, state) -> None:
    fleet.workers[worker.id] = worker
    fleet._set(worker, state, "in a test")


# --- the specs themselves ----------------------------------------------------------------------------------------------------


def doc_of(hook):
    return inspect.getdoc(getattr(HookSpecs, hook)) or ""


def arguments_of(hook):
    parameters = inspect.signature(getattr(HookSpecs, hook)).parameters
    return {name: written(parameter.annotation) for name, parameter in parameters.items() if name != "self"}


def written(annotation):
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation).removeprefix("typing.")


def example_of(hook):
    _, _, after = doc_of(hook).partition("\nExample")
    _, _, code = after.partition("\n\n")
    return ast.parse(textwrap.dedent(code))


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_says_when_it_runs_what_it_may_change_and_what_it_may_raise(hook):
    doc = doc_of(hook)
    assert re.search(r"^Runs ", doc, re.MULTILINE), "when does it run?"
    assert re.search(r"\b([Mm]ay change|[Mm]ay add|[Cc]hanges\s+n|Replaces)", doc), "what may it change?"
    assert re.search(r"^Raises: \S", doc, re.MULTILINE), "what may it raise?"


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_has_an_example_with_its_exact_signature(hook):
    [function] = [
        node for node in ast.walk(example_of(hook)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == hook
    ]
    assert [ast.unparse(decorator) for decorator in function.decorator_list] == ["hookimpl"]
    own, *arguments = function.args.args
    assert own.arg == "self"
    annotations = {argument.arg: argument.annotation and ast.unparse(argument.annotation) for argument in arguments}
    expected = arguments_of(hook)
    assert list(annotations) == list(expected)
    for name, annotation in expected.items():
        assert annotations[name] == annotation or annotation == "Any", name


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_names_each_of_its_arguments_in_its_documentation(hook):
    prose, _, _ = doc_of(hook).partition("\nExample")
    for name in arguments_of(hook):
        assert re.search(rf"\b{name}s?\b", prose), name


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_has_a_test_of_its_own(hook):
    assert any(name.startswith(f"test_hook_{hook}") for name in globals())


def test_no_test_is_for_a_hook_that_does_not_exist():
    for name in globals():
        if name.startswith("test_hook_"):
            assert name.removeprefix("test_hook_").startswith(HOOKS), name
