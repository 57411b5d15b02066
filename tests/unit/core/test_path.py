"""A unary call from the client's bytes to the settling, with every way in which it can end."""

import pytest
import structlog
import trio
from trio.testing import wait_all_tasks_blocked

from core import path as path_module
from core import registry as registry_module
from core.call import Call
from core.errors import BadRequest, CallError, WorkerLost, from_grpc
from core.hookspecs import hookimpl
from core.settings import GateSettings, ServerSettings
from core.wire import GRPCError, Status
from tests.unit.core.lanes import ScriptedLane, output
from tests.unit.core.rig import Browser, Rig, make_worker


def body(**fields):
    return {"token_ids": [1, 2, 3], "sampling_params": {}, **fields}


async def test_a_reply_names_the_model_that_a_plugin_says_it_names():
    class Renames:
        @hookimpl
        def receive_call(self, call: Call) -> None:
            call.model, call.reply_model = "tiny", call.model

    lane = ScriptedLane([output(7, finish="stop")])
    browser = await Browser(body(model="math")).ask(Rig(make_worker("a", lane), plugins=[Renames()]))
    assert (lane.requests[0].model, browser.json["model"]) == ("tiny", "math")


async def test_a_unary_call_is_answered_whole():
    rig = Rig(make_worker("a", ScriptedLane([output(7, 8, finish="length", cached_tokens=2)])))
    browser = await Browser(headers={"x-request-id": "mine"}).ask(rig)
    assert browser.status == 200
    assert browser.complete
    reply = browser.json
    assert reply["request_id"] == "mine"
    assert reply["model"] == "tiny"
    assert reply["choices"][0]["token_ids"] == [7, 8]
    assert reply["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert browser.headers["x-request-id"] == "mine"
    assert browser.headers["x-headrace-worker"] == "a"
    assert browser.headers["x-headrace-route"] == "round-robin"


async def test_an_answered_call_settles_once_as_ok_with_its_counts():
    rig = Rig(make_worker("a", ScriptedLane([output(7, 8, finish="length", cached_tokens=2)])))
    await Browser().ask(rig)
    outcome = rig.outcome
    assert (outcome.kind, outcome.status, outcome.worker, outcome.wire, outcome.route) == ("ok", 200, "a", "grpc", "round-robin")
    assert (outcome.prompt_tokens, outcome.output_tokens, outcome.cached_tokens, outcome.attempts) == (3, 2, 2, 1)
    assert outcome.first_output_seconds is not None
    assert outcome.seconds >= outcome.first_output_seconds
    assert rig.in_flight == [0]


async def test_a_body_that_is_no_call_is_refused_and_never_settles_because_no_hook_has_seen_it():
    rig = Rig(make_worker("a", ScriptedLane([output(7, finish="stop")])))
    browser = await Browser(b"{", headers={"x-request-id": "mine"}).ask(rig)
    assert browser.status == 400
    assert browser.headers["x-request-id"] == "mine"
    assert rig.witness.outcomes == []


async def test_a_body_that_is_no_call_is_refused_with_an_id_of_ours_where_the_client_gave_none():
    ids = {(await Browser(b"{").ask(Rig(make_worker("a", ScriptedLane())))).headers["x-request-id"] for _ in range(2)}
    assert [len(id_) for id_ in ids] == [32, 32]


async def test_an_unknown_key_is_refused_with_the_nearest_known_one():
    rig = Rig(make_worker("a", ScriptedLane([output(7, finish="stop")])))
    browser = await Browser(body(sampling_params={"temperatur": 1})).ask(rig)
    assert browser.status == 400
    assert browser.json["error"] == {
        "message": "sampling_params.temperatur: there is no such key here; did you mean 'temperature'?",
        "type": "BadRequestError",
        "param": "sampling_params.temperatur",
        "code": 400,
    }
    assert (rig.outcome.kind, rig.outcome.status) == ("refused", 400)


async def test_an_unknown_key_of_the_body_with_a_dot_in_it_is_still_one_key_of_the_body():
    rig = Rig(make_worker("a", ScriptedLane([output(7, finish="stop")])))
    browser = await Browser(body(**{"a.modell": 1})).ask(rig)
    assert browser.json["error"]["param"] == "a.modell"
    assert "'model'" in browser.json["error"]["message"]


@pytest.mark.parametrize(("value", "named"), [({"x": 1, "y": 2}, "extra_body.x"), ({}, "extra_body"), ([1], "extra_body")])
async def test_of_an_object_that_plugins_share_the_member_is_named_that_none_has_taken(value, named):
    rig = Rig(make_worker("a", ScriptedLane([output(7, finish="stop")])))
    error = (await Browser(body(extra_body=value)).ask(rig)).json["error"]
    assert (error["code"], error["param"]) == (400, named)
    assert error["message"].startswith(f"{named}: there is no such key here; ")


async def test_a_key_that_a_plugin_pops_is_honoured():
    class Claims:
        @hookimpl
        def receive_call(self, call: Call) -> None:
            call.unclaimed.pop("mine")
            call.unclaimed_sampling.pop("ours")

    rig = Rig(make_worker("a", ScriptedLane([output(7, finish="stop")])), plugins=[Claims()])
    assert (await Browser(body(mine=1, sampling_params={"ours": 2})).ask(rig)).status == 200


async def test_a_workers_refusal_keeps_its_status_and_its_words():
    error = CallError(400, "temperature must be in [0, 2], got 3")
    rig = Rig(make_worker("a", ScriptedLane([error])), make_worker("b", ScriptedLane([error])))
    browser = await Browser().ask(rig)
    assert browser.status == 400
    assert browser.json["error"]["message"] == "temperature must be in [0, 2], got 3"
    assert (rig.outcome.kind, rig.outcome.attempts) == ("refused", 1)
    assert rig.in_flight == [0, 0]


async def test_a_failure_of_the_engine_is_failed_and_is_not_tried_elsewhere():
    rig = Rig(make_worker("a", ScriptedLane([CallError(500, "engine failed")])), make_worker("b", ScriptedLane([output(1, finish="stop")])))
    assert (await Browser().ask(rig)).status == 500
    assert (rig.outcome.kind, rig.outcome.error, rig.outcome.attempts) == ("failed", "engine failed", 1)


async def test_a_lost_worker_means_another_worker():
    lost = ScriptedLane([WorkerLost("gone")])
    rig = Rig(make_worker("a", lost), make_worker("b", ScriptedLane([output(7, finish="stop")])))
    browser = await Browser().ask(rig)
    assert browser.status == 200
    assert browser.headers["x-headrace-worker"] == "b"
    assert (rig.outcome.kind, rig.outcome.attempts) == ("ok", 2)
    assert rig.in_flight == [0, 0]


async def test_a_call_on_a_worker_that_died_with_its_connections_standing_is_answered_by_another():
    dead, alive = make_worker("a", ScriptedLane([trio.Event()])), make_worker("b", ScriptedLane([output(7, finish="stop")]))
    rig = Rig(dead, alive)
    async with trio.open_nursery() as nursery:
        browser = Browser()
        nursery.start_soon(browser.ask, rig)
        await wait_all_tasks_blocked()
        dead.lose_calls()
    assert browser.json["choices"][0]["token_ids"] == [7]
    assert (rig.outcome.worker, rig.outcome.attempts, rig.in_flight) == ("b", 2, [0, 0])


async def test_a_lost_worker_is_suspected_so_that_it_is_probed_at_once():
    rig = Rig(make_worker("a", ScriptedLane([WorkerLost("gone")])))
    await Browser().ask(rig)
    with trio.fail_after(1):
        await rig.workers[0].suspected()


async def test_no_worker_is_tried_twice_and_the_answer_tells_why_each_was_lost():
    lanes = [ScriptedLane([WorkerLost(f"reset {i}")]) for i in range(2)]
    rig = Rig(make_worker("a", lanes[0]), make_worker("b", lanes[1]), retries=9)
    browser = await Browser().ask(rig)
    assert browser.status == 503
    assert browser.json["error"]["message"] == "no worker is left: a (reset 0), b (reset 1)"
    assert browser.headers["retry-after"] == "1"
    assert [len(lane.requests) for lane in lanes] == [1, 1]
    assert rig.outcome.attempts == 2


async def test_retries_are_bounded():
    lanes = [ScriptedLane([WorkerLost(f"reset {i}")]) for i in range(5)]
    rig = Rig(*(make_worker(f"w{i}", lane) for i, lane in enumerate(lanes)), retries=2)
    browser = await Browser().ask(rig)
    assert browser.status == 503
    assert browser.json["error"]["message"].startswith("reset ")
    assert rig.outcome.attempts == 3
    assert sum(len(lane.requests) for lane in lanes) == 3


async def test_a_call_that_has_lost_its_worker_waits_for_a_paused_one_that_it_has_not_tried():
    rig = Rig(
        make_worker("a", ScriptedLane([WorkerLost("gone")])),
        make_worker("b", ScriptedLane([output(7, finish="stop")]), state="paused"),
    )
    browser = Browser()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(browser.ask, rig)
        await wait_all_tasks_blocked()
        assert not browser.messages
        rig.move(rig.workers[1], "ready")
    assert browser.headers["x-headrace-worker"] == "b"


async def test_a_call_that_a_paused_engine_refuses_waits_at_the_gate_and_is_answered():
    paused = from_grpc(GRPCError(Status.UNAVAILABLE, "Generation is paused. Please retry after it resumes."))
    worker = make_worker("a", ScriptedLane([paused], [output(7, finish="stop")]))
    rig = Rig(worker)
    async with trio.open_nursery() as nursery:
        browser = Browser()
        nursery.start_soon(browser.ask, rig)
        await wait_all_tasks_blocked()
        assert (worker.state, rig.fleet.gate.waiting) == ("paused", 1)
        rig.move(worker, "ready")
    assert browser.json["choices"][0]["token_ids"] == [7]


async def test_a_client_that_goes_away_releases_the_worker_and_settles_as_client_gone():
    lane = ScriptedLane([trio.Event()])
    rig = Rig(make_worker("a", lane))
    browser = Browser()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(browser.ask, rig)
        await wait_all_tasks_blocked()
        assert rig.in_flight == [1]
        browser.gone.set()
    assert (lane.open, lane.cancelled) == (0, 1)
    assert (rig.outcome.kind, rig.outcome.status) == ("client-gone", 499)
    assert rig.in_flight == [0]
    assert browser.messages == []


async def test_a_client_that_goes_away_at_the_gate_leaves_it():
    rig = Rig(make_worker("a", ScriptedLane([output(7)]), state="paused"))
    browser = Browser()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(browser.ask, rig)
        await wait_all_tasks_blocked()
        assert rig.fleet.gate.waiting == 1
        browser.gone.set()
    assert rig.fleet.gate.waiting == 0
    assert rig.outcome.kind == "client-gone"


async def test_a_call_that_headrace_cancels_settles_as_cancelled():
    lane = ScriptedLane([trio.Event()])
    rig = Rig(make_worker("a", lane))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Browser().ask, rig)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert (rig.outcome.kind, rig.outcome.status) == ("cancelled", 503)
    assert (lane.cancelled, rig.in_flight) == (1, [0])


async def test_a_client_that_leaves_while_it_sends_its_body_is_no_call():
    rig = Rig(make_worker("a", ScriptedLane([output(7)])))
    browser = Browser()
    browser._body = None
    browser.gone.set()
    await browser.ask(rig)
    assert browser.messages == []
    assert rig.witness.outcomes == []


async def test_a_fault_of_headrace_itself_settles_as_failed_and_goes_on_to_the_server():
    rig = Rig(make_worker("a", ScriptedLane([ZeroDivisionError("a bug")])))
    with pytest.raises(ZeroDivisionError):
        await Browser().ask(rig)
    assert (rig.outcome.kind, rig.outcome.status, rig.outcome.error) == ("failed", 500, "ZeroDivisionError")
    assert rig.in_flight == [0]


@pytest.mark.parametrize("hook", ["receive_call", "identify_call", "eligible_workers", "choose_worker", "lower_call", "lift_result"])
async def test_a_plugin_fault_is_a_500_with_its_name_and_touches_no_other_call(hook):
    broken = True

    def fail(self):
        if broken:
            raise KeyError("secret 4711")

    plugin = type("Plugin", (), {hook: hookimpl(fail)})()
    policies = ("p0", "round-robin") if hook == "choose_worker" else ("round-robin",)
    rig = Rig(make_worker("a", ScriptedLane([output(7, finish="stop")])), plugins=[plugin], policies=policies)
    browser = await Browser().ask(rig)
    assert browser.status == 500
    assert browser.json["error"]["message"] == f"plugin 'p0' failed in {hook}: KeyError"
    assert rig.outcome.kind == "failed"
    assert rig.in_flight == [0]
    broken = False
    assert (await Browser().ask(rig)).status == 200


async def test_a_plugin_fault_is_logged_with_its_traceback(monkeypatch):
    class Broken:
        @hookimpl
        def receive_call(self) -> None:
            raise KeyError("what the author of the plugin has to see")

    lines = _log(monkeypatch)
    await Browser(headers={"x-request-id": "r7"}).ask(Rig(make_worker("a", ScriptedLane([output(7)])), plugins=[Broken()]))
    [fault] = [line for line in lines if line["event"] == "plugin.failed"]
    assert (fault["id"], fault["plugin"], fault["hook"]) == ("r7", "p0", "receive_call")
    assert "what the author of the plugin has to see" in fault["exception"]


async def test_a_plugin_that_fails_when_a_call_settles_hides_it_from_no_other_plugin(monkeypatch):
    class Broken:
        @hookimpl(tryfirst=True)
        def call_settled(self) -> None:
            raise ValueError("mine alone")

    lines = _log(monkeypatch)
    rig = Rig(make_worker("a", ScriptedLane([output(7, finish="stop")])), plugins=[Broken()])
    assert (await Browser().ask(rig)).status == 200
    assert rig.outcome.kind == "ok"
    [fault] = [line for line in lines if line["event"] == "plugin.failed"]
    assert fault["plugin"] == "p0"


async def test_a_plugin_may_refuse_a_call():
    class HouseRule:
        @hookimpl
        def receive_call(self, call: Call) -> None:
            raise BadRequest("token_ids: not today", param="token_ids")

    rig = Rig(make_worker("a", ScriptedLane([output(7)])), plugins=[HouseRule()])
    browser = await Browser().ask(rig)
    assert browser.status == 400
    assert browser.json["error"]["param"] == "token_ids"
    assert rig.outcome.kind == "refused"


async def test_headers_that_plugins_add_are_in_the_reply_and_in_the_error():
    class Adds:
        @hookimpl
        def receive_call(self, call: Call) -> None:
            call.reply_headers["X-Mine"] = "1"

    for script, status in (([output(7, finish="stop")], 200), ([CallError(500, "no")], 500)):
        browser = await Browser().ask(Rig(make_worker("a", ScriptedLane(script)), plugins=[Adds()]))
        assert browser.status == status
        assert browser.headers["x-mine"] == "1"


@pytest.mark.parametrize(
    ("reason", "header"),
    [
        ("kv → worker", "kv ? worker"),
        ("a\r\nset-cookie: evil=1", "a  set-cookie: evil=1"),
        ("  padded  ", "padded"),
        ("nul\0", "nul"),
    ],
)
async def test_no_reason_of_a_plugin_breaks_or_forges_the_response_head(reason, header):
    class Odd:
        @hookimpl
        def receive_call(self, call: Call) -> None:
            call.reply_headers["x-odd"] = reason

    browser = await Browser().ask(Rig(make_worker("a", ScriptedLane([output(7, finish="stop")])), plugins=[Odd()]))
    assert browser.status == 200
    assert browser.headers["x-odd"] == header


async def test_a_request_id_of_the_body_with_spaces_around_it_breaks_no_header():
    browser = await Browser(body(request_id=" r 1 ")).ask(Rig(make_worker("a", ScriptedLane([output(7, finish="stop")]))))
    assert browser.json["request_id"] == " r 1 "
    assert browser.headers["x-request-id"] == "r 1"


async def test_a_body_over_the_limit_is_a_413():
    rig = Rig(make_worker("a", ScriptedLane([output(7)])), server=ServerSettings(max_body_mib=1))
    browser = await Browser(b" " * (1 << 20) + b"{}").ask(rig)
    assert browser.status == 413
    assert browser.json["error"]["type"] == "RequestEntityTooLarge"


async def test_another_method_on_the_generate_route_is_a_405_as_in_vllm():
    rig = Rig(make_worker("a", ScriptedLane([output(7)])))
    browser = await Browser(method="GET").ask(rig)
    assert browser.status == 405
    assert browser.headers["allow"] == "POST"
    assert browser.json["error"]["code"] == 405


async def test_calls_wait_at_the_gate_and_are_all_answered_when_it_opens():
    rig = Rig(make_worker("a", ScriptedLane([output(7, finish="stop")]), state="paused"))
    browsers = [Browser() for _ in range(20)]
    async with trio.open_nursery() as nursery:
        for browser in browsers:
            nursery.start_soon(browser.ask, rig)
        await wait_all_tasks_blocked()
        assert rig.fleet.gate.waiting == 20
        rig.move(rig.workers[0], "ready")
    assert [browser.status for browser in browsers] == [200] * 20
    assert rig.fleet.gate.waiting == 0


async def test_one_call_too_many_at_the_gate_is_a_503_that_says_so():
    rig = Rig(make_worker("a", ScriptedLane([output(7)]), state="paused"), gate=GateSettings(max_waiting=1))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Browser().ask, rig)
        await wait_all_tasks_blocked()
        browser = await Browser().ask(rig)
        nursery.cancel_scope.cancel()
    assert browser.status == 503
    assert browser.json["error"]["message"] == "the fleet is paused and 1 calls wait already (gate.max_waiting)"


TOKENS = [700001, 700002, 700003]


@pytest.mark.parametrize(
    "end",
    [
        output(800001, finish="stop"),
        CallError(400, "token_id(s) [700001, 700003] in prompt are out of vocabulary. Vocabulary size: 320"),
        WorkerLost("lost [700001]"),
    ],
)
async def test_the_line_that_tells_of_a_settled_call_never_holds_tokens(monkeypatch, end):
    lines = _log(monkeypatch)
    await Browser(body(token_ids=TOKENS)).ask(Rig(make_worker("a", ScriptedLane([end])), retries=0))
    [line] = [line for line in lines if line["event"] == "call.settled"]
    assert line["id"]
    assert line["worker"] == "a"
    assert "70000" not in str(lines)
    assert "80000" not in str(lines)


async def test_the_line_of_a_refused_call_still_says_why(monkeypatch):
    lines = _log(monkeypatch)
    await Browser().ask(Rig(make_worker("a", ScriptedLane([CallError(400, "temperature must be in [0, 2], got 3")]))))
    assert lines[-1]["error"] == "temperature must be in […], got 3"


def _log(monkeypatch):
    """The lines that the core logs, whatever another test has configured."""
    lines = []

    def keep(_logger, _method, event):
        lines.append(event)
        raise structlog.DropEvent

    logger = structlog.wrap_logger(None, processors=[structlog.processors.format_exc_info, keep], wrapper_class=structlog.BoundLogger)
    for module in (path_module, registry_module):
        monkeypatch.setattr(module, "log", logger)
    return lines
