"""The routes beside the hottest one: vLLM's error bodies for whatever goes wrong."""

import pytest
import trio
from msgspec.structs import replace
from trio.testing import wait_all_tasks_blocked

from core.errors import BadRequest, CallError, NotFound, NoWorker
from core.fleet.administration import Administration
from core.northbound.status import add_status_routes
from core.routes import Exchange, HTTPReply, HTTPRequest, Routes
from core.settings import AdministrationSettings
from tests.unit.core.lanes import ScriptedLane, output
from tests.unit.core.rig import Browser, Rig, make_worker


async def ask(routes, method, path, body=b"", query="", headers=None):
    browser = Browser(body, {"content-type": "application/json", **(headers or {})}, method=method, path=path, query=query)
    await routes(browser.scope, browser.receive, browser.send)
    return browser


@pytest.fixture
def routes():
    return Routes(max_body_bytes=1000)


async def test_a_handler_gets_the_request_and_gives_the_reply(routes):
    async def handler(request: HTTPRequest) -> HTTPReply:
        return HTTPReply.json([request.method, request.path, dict(request.query), dict(request.parameters), request.json()], 201)

    routes.add("POST", "/things/<id>", handler)
    browser = await ask(routes, "POST", "/things/a%20b", b'{"x":1}', "q=1")
    assert browser.status == 201
    assert browser.headers["content-type"] == "application/json"
    assert browser.json == ["POST", "/things/a%20b", {"q": "1"}, {"id": "a%20b"}, {"x": 1}]


async def test_a_route_is_asked_without_a_connection(routes):
    async def handler(request: HTTPRequest) -> HTTPReply:
        if not request.body:
            raise BadRequest("nothing in it", param="x")
        return HTTPReply.json([request.path, dict(request.parameters), request.client])

    routes.add("POST", "/things/<id>", handler)
    request = HTTPRequest("POST", "/things/a:1/", {}, {}, b"x", {}, client="me")
    with pytest.raises(NotFound, match="there is no route POST /things/a:1/"):
        await routes.ask(request)
    request = replace(request, path="/things/a:1")
    assert (await routes.ask(request)).body == b'["/things/a:1",{"id":"a:1"},"me"]'
    with pytest.raises(BadRequest, match="nothing in it"):
        await routes.ask(replace(request, body=b""))
    with pytest.raises(NotFound, match="there is no route GET /things/a:1"):
        await routes.ask(replace(request, method="GET"))


async def test_an_unknown_route_is_a_404_in_vllms_words(routes):
    browser = await ask(routes, "GET", "/nope")
    assert browser.status == 404
    assert browser.json == {"error": {"message": "there is no route GET /nope", "type": "NotFoundError", "param": None, "code": 404}}


async def test_a_path_that_is_not_served_is_shown_as_it_was_asked(routes):
    browser = await ask(routes, "POST", "//x/y")
    assert (browser.status, browser.json["error"]["message"]) == (404, "there is no route POST //x/y")


async def test_another_method_is_a_405(routes):
    routes.add("POST", "/x", lambda _: None)
    browser = await ask(routes, "DELETE", "/x")
    assert browser.status == 405
    assert browser.json["error"]["message"] == "/x is not served for DELETE"
    assert "POST" in browser.headers["allow"]


@pytest.mark.parametrize("method", ["OPTIONS", "PUT"])
async def test_no_method_is_answered_but_by_a_handler(routes, method):
    routes.add("GET", "/x", lambda _: None)
    browser = await ask(routes, method, "/x")
    assert browser.status == 405
    assert browser.json["error"]["message"] == f"/x is not served for {method}"
    assert browser.headers["allow"] == "GET, HEAD"


async def test_a_body_that_is_declared_over_the_limit_is_a_413(routes):
    browser = await ask(routes, "POST", "/x", b"x", headers={"content-length": "1001"})
    assert browser.status == 413
    assert "max_body_mib" in browser.json["error"]["message"]


async def test_a_body_that_does_not_come_is_a_408_with_its_id(autojump_clock):
    routes = Routes(max_body_bytes=1000, body_timeout=5)

    async def never():
        await trio.sleep_forever()

    browser = Browser(b"", {"x-request-id": "mine"}, method="POST")
    await routes({**browser.scope, "path": "/x"}, never, browser.send)
    assert (browser.status, browser.headers["x-request-id"], trio.current_time()) == (408, "mine", 5)
    assert browser.json["error"]["code"] == 408


async def test_a_body_over_the_limit_is_a_413(routes):
    async def handler(request: HTTPRequest) -> HTTPReply:
        return HTTPReply()

    routes.add("POST", "/x", handler)
    browser = await ask(routes, "POST", "/x", b"x" * 2000)
    assert browser.status == 413
    assert browser.json["error"]["code"] == 413


@pytest.mark.parametrize("error", [BadRequest("no", param="x"), CallError(409, "busy"), NoWorker("none", retry_after=3)])
async def test_what_a_handler_refuses_is_its_status(routes, error):
    async def handler(request: HTTPRequest) -> HTTPReply:
        raise error

    routes.add("GET", "/x", handler)
    browser = await ask(routes, "GET", "/x")
    assert browser.status == error.status
    assert browser.json["error"]["message"] == error.message
    assert browser.headers.get("retry-after") == (None if error.retry_after is None else str(error.retry_after))


@pytest.mark.parametrize("fault", [ValueError("secret"), SystemExit("secret")])
@pytest.mark.parametrize(("owner", "whose"), [("", "a fault of headrace: "), ("mine", "plugin 'mine' failed in GET ")])
async def test_a_fault_of_a_handler_is_a_500_in_vllms_words_that_says_whose_it_is_without_its_text(routes, owner, whose, fault):
    async def handle(_: HTTPRequest | Exchange) -> HTTPReply:
        raise fault

    with routes.owned_by(owner):
        routes.add("GET", "/x", handle)
        routes.add_streamed("GET", "/y", handle)
    for path in ("/x", "/y"):
        browser = await ask(routes, "GET", path)
        assert browser.status == 500
        assert browser.json["error"]["type"] == "InternalServerError"
        assert whose in browser.json["error"]["message"]
        assert browser.json["error"]["message"].endswith(f": {type(fault).__name__}")
    with pytest.raises(CallError, match=whose):
        await routes.ask(HTTPRequest("GET", "/x", {}, {}, b"", {}))


async def test_a_streamed_answer_whose_handler_fails_is_not_answered_twice(routes):
    async def handle(exchange: Exchange) -> None:
        await exchange.send({"type": "http.response.start", "status": 200, "headers": []})
        raise SystemExit(2)

    routes.add_streamed("GET", "/x", handle)
    browser = await ask(routes, "GET", "/x")
    assert [message["type"] for message in browser.messages] == ["http.response.start"]


@pytest.mark.parametrize("body", [b"{", b"\xff", b"[" * 400 + b"]" * 300])
async def test_a_body_that_is_no_json_is_a_400(routes, body):
    async def handler(request: HTTPRequest) -> HTTPReply:
        return HTTPReply.json(request.json())

    routes.add("POST", "/x", handler)
    assert (await ask(routes, "POST", "/x", body)).status == 400


async def test_an_empty_body_is_none(routes):
    async def handler(request: HTTPRequest) -> HTTPReply:
        return HTTPReply.json(request.json())

    routes.add("POST", "/x", handler)
    assert (await ask(routes, "POST", "/x", b" ")).json is None


def test_a_route_that_is_served_already_is_refused(routes):
    routes.add("GET", "/x", lambda _: None)
    routes.add("POST", "/x", lambda _: None)
    with pytest.raises(ValueError, match="GET /x is served already"):
        routes.add("GET", "/x", lambda _: None)


async def test_a_client_that_goes_away_cancels_the_handler(routes):
    ended = trio.Event()

    async def handler(request: HTTPRequest) -> HTTPReply:
        try:
            await trio.sleep_forever()
        finally:
            ended.set()

    routes.add("GET", "/x", handler)
    browser = Browser(b"", method="GET", path="/x")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(routes, browser.scope, browser.receive, browser.send)
        await wait_all_tasks_blocked()
        browser.gone.set()
        with trio.fail_after(1):
            await ended.wait()


# --- status ------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def status(routes):
    def make(*workers):
        rig = Rig(*workers)
        add_status_routes(routes, rig.fleet, Administration(rig.fleet, AdministrationSettings(), {}), rig.metrics, rig.registry)
        return routes

    return make


@pytest.mark.parametrize("path", ["/ready", "/health"])
async def test_a_fleet_is_ready_with_a_worker_that_answers_whole_calls(status, path):
    prefill, decode = make_worker("p", role="prefill"), make_worker("d", role="decode", state="gone")
    routes = status(prefill, decode)
    browser = await ask(routes, "GET", path)
    assert browser.status == 503
    assert browser.json["error"]["message"] == "no worker is ready that answers whole calls: p is for prefill only"
    assert (await ask(routes, "GET", "/workers/p/health")).status == 200
    decode.state = "ready"
    assert (await ask(routes, "GET", path)).status == 200


@pytest.mark.parametrize(("state", "code"), [("ready", 200), ("paused", 200), ("updating", 200), ("gone", 503), ("starting", 503)])
async def test_health_is_whether_a_call_would_be_served(status, state, code):
    routes = status(make_worker("a", ScriptedLane(), state=state))
    assert (await ask(routes, "GET", "/health")).status == code
    assert (await ask(routes, "GET", "/live")).status == 200


async def test_one_worker_says_how_it_is_and_what_it_serves(status):
    a, b = make_worker("a", ScriptedLane(), state="gone"), make_worker("b:1", ScriptedLane(), models=["other"])
    routes = status(a, b)
    assert (await ask(routes, "GET", "/workers/b:1/health")).status == 200
    browser = await ask(routes, "GET", "/workers/a/health")
    assert (browser.status, browser.json["error"]["message"]) == (503, "worker 'a' is gone: gone in a test")
    assert [card["id"] for card in (await ask(routes, "GET", "/workers/b:1/v1/models")).json["data"]] == ["other"]
    assert (await ask(routes, "GET", "/workers/a/v1/models")).json["data"] == []
    browser = await ask(routes, "GET", "/workers/c/health")
    assert (browser.status, browser.json["error"]["message"]) == (404, "there is no worker 'c'; the fleet has a, b:1")


async def test_the_journal_is_shown_from_a_time_on_and_the_latest_of_it(routes):
    rig = Rig(make_worker("a", ScriptedLane()))
    administration = Administration(rig.fleet, AdministrationSettings(), {})
    add_status_routes(routes, rig.fleet, administration, rig.metrics, rig.registry)
    for what in ("one", "two", "three"):
        administration.journal.add(what, ["a"], by="me")

    async def shown(query):
        return [entry["what"] for entry in (await ask(routes, "GET", "/fleet/journal", query=query)).json["entries"]]

    second = administration.journal.entries[1].at
    assert await shown("") == ["one", "two", "three"]
    assert (await shown("limit=1"), await shown("limit=0"), await shown("limit=9")) == (["three"], [], ["one", "two", "three"])
    assert await shown(f"since={second!r}") == ["two", "three"]
    assert await shown(f"since={second!r}&limit=1") == ["three"]
    for query, param in (("limit=-1", "limit"), ("limit=1.5", "limit"), ("since=nan", "since"), ("since=now", "since"), ("to=1", "to")):
        browser = await ask(routes, "GET", "/fleet/journal", query=query)
        assert (browser.status, browser.json["error"]["param"]) == (400, param)


async def test_models_are_listed_once_with_the_shortest_length(status):
    a, b, gone = (make_worker(name, ScriptedLane(), models=["tiny"]) for name in "abc")
    b.info = b.info and type(b.info)(models=("tiny", "other"), model_id="tiny", max_model_len=50)
    gone.state = "gone"
    routes = status(a, b, gone)
    cards = (await ask(routes, "GET", "/v1/models")).json["data"]
    assert [(card["id"], card["max_model_len"]) for card in cards] == [("tiny", 50), ("other", 50)]


async def test_the_fleet_is_described(status):
    [entry] = (await ask(status(make_worker("a", ScriptedLane(), state="paused")), "GET", "/fleet")).json["workers"]
    assert (entry["id"], entry["state"], entry["reason"], entry["model"]) == ("a", "paused", "paused in a test", "tiny")
    assert entry["capabilities"]["wires"]["grpc"]


async def test_a_worker_that_has_left_leaves_no_series_behind(status):
    worker = make_worker("a", ScriptedLane())
    rig = Rig(worker)
    assert b'headrace_worker_in_flight{worker="a"} 0.0' in rig.metrics.text()
    del rig.fleet.workers["a"]
    assert b"headrace_worker_in_flight{" not in rig.metrics.text()


async def test_quarantined_workers_are_counted_and_their_reason_is_shown(status):
    rig = Rig(make_worker("a", ScriptedLane()), make_worker("b", ScriptedLane()))
    rig.fleet.hold(rig.workers[0], "quarantined", "it failed in update_weights")
    text = rig.metrics.text()
    assert b"headrace_quarantined_workers 1.0" in text
    assert b'headrace_quarantine{reason="it failed in update_weights",worker="a"} 1.0' in text
    assert b'headrace_worker_state{state="quarantined",worker="a"} 1.0' in text
    entry = rig.workers[0].describe()
    assert (entry["state"], entry["reason"]) == ("quarantined", "it failed in update_weights")


async def test_settled_calls_are_counted():
    rig = Rig(make_worker("a", ScriptedLane([output(7, 8, finish="stop", cached_tokens=2)])))
    await Browser().ask(rig)
    text = rig.metrics.text().decode()
    assert 'headrace_calls_total{outcome="ok",wire="grpc",worker="a"} 1.0' in text
    assert "headrace_prompt_tokens_total 3.0" in text
    assert "headrace_cached_tokens_total 2.0" in text
    assert "headrace_output_tokens_total 2.0" in text
