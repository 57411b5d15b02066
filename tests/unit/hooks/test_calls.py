"""The hooks in the life of a call, as plugins see them: each runs with its exact arguments."""

from collections.abc import Awaitable

import pytest
import trio
from msgspec.structs import replace
from trio.testing import wait_all_tasks_blocked

from core.call import Call, Identity, Outcome
from core.errors import CallError, WorkerLost
from core.fleet.worker import Worker
from core.hookspecs import Choice, hookimpl
from core.proxy import Proxy
from core.reply import GenerateReply, Output
from core.wire.generated.inference_pb2 import GenerateRequest
from tests.unit.core.lanes import ScriptedLane, output
from tests.unit.core.rig import Browser, Rig, make_worker
from tests.unit.hooks.proxies import BODY, ask, move


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
