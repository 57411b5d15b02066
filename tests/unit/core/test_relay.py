"""Relayed calls: the whole path over real sockets, between a client that is a plain ASGI callable and workers that follow a script."""

from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw
from trio.testing import wait_all_tasks_blocked

from core.call import Identity
from core.errors import BadRequest, CallError
from core.fleet.worker import WorkerInfo
from core.hookspecs import Choice, hookimpl
from core.northbound.relay import Relay, parse_relayed
from core.routes import Exchange, Routes
from tests.unit.core.lanes import ScriptedLane
from tests.unit.core.rig import Browser, Rig, make_worker
from tests.unit.core.upstream import ABORT, GONE, Upstream, chunk, chunked, response, upstream_worker

PATH = "/v1/completions"
EVENTS = b"content-type: text/event-stream"
OK = response(b"{}")


class Relayed(Rig):
    """A rig whose one route is relayed."""

    def __init__(self, *workers: Any, reader: Any = None, **options: Any) -> None:
        super().__init__(*workers, **options)
        relay = Relay(self.path, self.clients)

        async def handle(exchange: Exchange) -> None:
            await relay(exchange, reader)

        self.routes = Routes(max_body_bytes=1000)
        self.routes.add_streamed("POST", PATH, handle)


class Asking(Browser):
    """A client of that route."""

    def __init__(self, body: Any = None, headers: Any = None, *, query: bytes = b"", http: str = "1.1", method: str = "POST") -> None:
        super().__init__({"prompt": "hi"} if body is None else body, headers, method=method)
        self.scope |= {"path": PATH, "query_string": query, "http_version": http}

    async def ask(self, rig: Any) -> "Asking":
        await rig.routes(self.scope, self.receive, self.send)
        return self


@asynccontextmanager
async def relaying(*upstreams: Upstream, **options: Any):
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(upstream_worker(f"w{i}", upstream)) for i, upstream in enumerate(upstreams)]
        yield Relayed(*workers, **options)


async def relayed(*script: Any, asking: Asking | None = None, **options: Any) -> tuple[Asking, Upstream, Relayed]:
    """One request to one worker, to its end."""
    upstream = Upstream(script)
    async with relaying(upstream, **options) as rig:
        return await (asking or Asking()).ask(rig), upstream, rig


class Hooks:
    """A plugin whose hooks are given when it is made."""

    def __init__(self, receive: Any = None, lower: Any = None) -> None:
        self._receive = receive
        self._lower = lower

    @hookimpl
    def receive_call(self, call) -> None:
        if self._receive:
            self._receive(call)

    @hookimpl
    def lower_call(self, call, worker, request) -> None:
        if self._lower:
            self._lower(request)


# --- to the worker -----------------------------------------------------------------------------------------------------------


async def test_method_path_query_and_body_reach_the_worker_byte_for_byte():
    body = b' {"prompt" : "h\\u0069" ,\n"seed": 1.50, "x":[ ]}'
    _, upstream, _ = await relayed(OK, asking=Asking(body, query=b"a=1&a=%202&b"))
    [request] = upstream.requests
    assert (request.method, request.target, request.body) == ("POST", f"{PATH}?a=1&a=%202&b", body)


async def test_a_workers_url_may_have_a_path():
    upstream = Upstream([OK])
    async with upstream_worker("w0", upstream, prefix="/engine/") as worker:
        await Asking().ask(Relayed(worker))
    assert upstream.requests[0].target == f"/engine{PATH}"


async def test_no_header_is_added_to_the_request_but_its_id():
    _, upstream, _ = await relayed(OK, asking=Asking({}, {"x-session-id": "s", "x-request-id": "r7"}))
    [request] = upstream.requests
    host = request.values("host")
    assert sorted(request.headers) == sorted([("host", host[0]), ("content-length", "2"), ("x-session-id", "s"), ("x-request-id", "r7")])


async def test_headers_of_the_clients_connection_stay_on_it():
    headers = {"connection": "close, X-Mine", "x-mine": "1", "te": "trailers", "transfer-encoding": "chunked", "upgrade": "h2c"}
    headers |= {"expect": "100-continue", "proxy-authorization": "secret", "host": "front", "keep-alive": "5", "x-other": "2"}
    _, upstream, _ = await relayed(OK, asking=Asking({}, headers))
    names = {name for name, _ in upstream.requests[0].headers}
    assert names == {"host", "content-length", "x-other", "x-request-id"}
    assert upstream.requests[0].values("host") != ["front"]


async def test_authorization_is_the_workers_own():
    upstream = Upstream([OK])
    async with upstream_worker("w0", upstream, key="worker-key") as worker:
        await Asking({}, {"authorization": "Bearer client-key"}).ask(Relayed(worker))
    assert upstream.requests[0].values("authorization") == ["Bearer worker-key"]


async def test_a_worker_that_wants_another_key_is_replaced_and_when_none_is_left_the_settings_are_to_blame():
    wants = Upstream([response(b'{"error":"Unauthorized"}', status=b"401 Unauthorized")])
    async with upstream_worker("w0", wants, key="old") as first, upstream_worker("w1", Upstream([OK])) as second:
        browser = await Asking({}).ask(Relayed(first, second, policies=["round-robin"]))
        assert (browser.status, browser.headers["x-headrace-worker"]) == (200, "w1")
        browser = await Asking({}).ask(Relayed(first))
    assert (browser.status, browser.headers["x-headrace-worker"]) == (503, "w0")
    assert "refuses the API key (401): the variable that api_key_env names holds another one" in browser.json["error"]["message"]


async def test_a_worker_without_a_key_gets_none():
    _, upstream, _ = await relayed(OK, asking=Asking({}, {"authorization": "Bearer client-key"}))
    assert upstream.requests[0].values("authorization") == []


async def test_a_cookie_that_one_answer_sets_is_not_sent_with_the_next_request():
    upstream = Upstream([response(b"{}", b"set-cookie: who=alice")])
    async with relaying(upstream) as rig:
        first, _ = await Asking().ask(rig), await Asking().ask(rig)
    assert first.headers["set-cookie"] == "who=alice"
    assert upstream.requests[1].values("cookie") == []


async def test_header_values_need_not_be_ascii_and_may_come_twice():
    asking = Asking({})
    asking.scope["headers"] = [(b"x-name", "zoé".encode("latin-1")), (b"x-name", b"b")]
    _, upstream, _ = await relayed(OK, asking=asking)
    assert upstream.requests[0].values("x-name") == ["zoé, b"]


@pytest.mark.parametrize(
    ("headers", "body", "id_"), [({"x-request-id": "head"}, {"request_id": "body"}, "head"), ({}, {"request_id": "body"}, "body")]
)
async def test_the_calls_id_is_the_same_for_client_and_worker(headers, body, id_):
    browser, upstream, _ = await relayed(response(b"{}", b"X-Request-ID: workers"), asking=Asking(body, headers))
    assert (browser.headers["x-request-id"], upstream.requests[0].values("x-request-id")) == (id_, [id_])
    assert [name for name, _ in browser.messages[0]["headers"]].count(b"x-request-id") == 1


async def test_a_call_without_an_id_gets_one():
    browser, upstream, _ = await relayed(OK)
    assert upstream.requests[0].values("x-request-id") == [browser.headers["x-request-id"]]


# --- from the worker ---------------------------------------------------------------------------------------------------------


async def test_status_headers_and_body_come_back_byte_for_byte():
    body = bytes(range(256))
    headers = (b"Content-Encoding: gzip", b"Set-Cookie: a=1", b"Set-Cookie: b=2", b"X-Odd: zo\xe9")
    browser, _, _ = await relayed(response(body, *headers, status=b"418 Teapot"))
    assert (browser.status, browser.raw, browser.complete) == (418, body, True)
    assert browser.messages[0]["headers"][:5] == [
        (b"content-length", b"256"),
        (b"content-encoding", b"gzip"),
        (b"set-cookie", b"a=1"),
        (b"set-cookie", b"b=2"),
        (b"x-odd", b"zo\xe9"),
    ]


async def test_headers_of_the_workers_connection_stay_on_it():
    head = chunked(b"connection: keep-alive, X-Hop", b"keep-alive: timeout=5", b"x-hop: 1", b"date: now", b"server: axum")
    browser, _, _ = await relayed(head, chunk(b"{}"), chunk(b""))
    assert set(browser.headers) == {"x-request-id", "x-headrace-worker", "x-headrace-route"}


async def test_an_empty_answer_is_one():
    browser, _, rig = await relayed(response(b"", status=b"404 Not Found"))
    assert (browser.status, browser.raw, browser.complete) == (404, b"", True)
    assert (rig.outcome.kind, rig.outcome.status) == ("refused", 404)


PAUSED = b'{"error":{"message":"Generation is paused. Please retry after it resumes.","type":"ServiceUnavailableError","code":503}}'
#: As vllm-rs 0.33 begins every stream.
SILENT = [
    b'data: {"id":"c","object":"text_completion","choices":[{"index":0,"text":""}]}\n\n',
    b'data: {"id":"c","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n',
]
REFUSED = [
    [response(PAUSED, status=b"503 Unavailable")],
    [response(b"data: " + PAUSED + b"\n\ndata: [DONE]\n\n", EVENTS)],
    *([response(silent + b"data: " + PAUSED + b"\n\ndata: [DONE]\n\n", EVENTS)] for silent in SILENT),
    [
        chunked(EVENTS),
        chunk(SILENT[0][:20]),
        chunk(SILENT[0][20:]),
        chunk(b"data: " + PAUSED[:20]),
        chunk(PAUSED[20:] + b"\n\n"),
        chunk(b""),
    ],
]


@pytest.mark.parametrize("refused", REFUSED)
async def test_a_call_that_a_paused_worker_refuses_waits_at_the_gate_and_is_answered_when_it_opens(refused):
    upstream = Upstream(refused, [OK])
    browser = Asking()
    async with relaying(upstream) as rig, trio.open_nursery() as nursery:
        nursery.start_soon(browser.ask, rig)
        with trio.fail_after(5):
            while not rig.fleet.gate.waiting:
                await trio.lowlevel.checkpoint()
        assert (browser.messages, rig.workers[0].state) == ([], "paused")
        rig.move(rig.workers[0], "ready")
    assert (browser.status, browser.raw, rig.outcome.attempts) == (200, b"{}", 2)


@pytest.mark.parametrize(
    "answer",
    [
        response(b'{"error":{"message":"overloaded","code":503}}', status=b"503 Unavailable"),
        response(b"no", status=b"503 Unavailable"),
        response(SILENT[0] + b'data: {"error":{"message":"overloaded","code":503}}\n\n', EVENTS),
        response(SILENT[1], EVENTS),
        response(b"", EVENTS),
        response(PAUSED),
    ],
)
async def test_what_is_not_the_refusal_of_a_paused_worker_passes_as_it_is(answer):
    browser, upstream, _ = await relayed(answer)
    assert (browser.raw, len(upstream.requests)) == (answer.partition(b"\r\n\r\n")[2], 1)


async def test_an_event_without_output_waits_for_the_next_one_and_an_event_with_output_for_none():
    more = trio.Event()
    upstream = Upstream([chunked(EVENTS), chunk(SILENT[0]), more, chunk(b'data: {"choices":[{"text":"a"}]}\n\n'), trio.Event()])
    browser = Asking()
    async with relaying(upstream) as rig, trio.open_nursery() as nursery:
        nursery.start_soon(browser.ask, rig)
        await wait_all_tasks_blocked(0.05)
        assert browser.messages == []
        more.set()
        with trio.fail_after(5):
            while browser.raw != SILENT[0] + b'data: {"choices":[{"text":"a"}]}\n\n':
                await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()


async def test_each_piece_is_forwarded_at_once():
    more = [trio.Event(), trio.Event()]
    upstream = Upstream([chunked(EVENTS), chunk(b"data: a"), more[0], chunk(b"\n\n"), more[1], chunk(b"")])
    browser = Asking()
    async with relaying(upstream) as rig, trio.open_nursery() as nursery:
        nursery.start_soon(browser.ask, rig)
        for expected in (b"data: a", b"data: a\n\n"):
            with trio.fail_after(5):
                while browser.raw != expected:
                    await trio.lowlevel.checkpoint()
            assert not browser.complete
            more.pop(0).set()
    assert browser.complete


@pytest.mark.parametrize(("status", "kind"), [(b"200 OK", "ok"), (b"422 No", "refused"), (b"500 Oh", "failed")])
async def test_a_relayed_call_settles_once_with_what_the_worker_answered(status, kind):
    _, _, rig = await relayed(response(b"{}", status=status))
    outcome = rig.outcome
    assert (outcome.kind, outcome.status, outcome.worker, outcome.wire) == (kind, int(status[:3]), "w0", "http")
    assert (outcome.route, outcome.attempts, rig.in_flight) == ("round-robin", 1, [0])
    assert outcome.first_output_seconds is not None


class Notes:
    def __init__(self) -> None:
        self.seen = b""

    def see(self, data: bytes) -> None:
        self.seen += data

    def settle(self, call: Any, outcome: Any) -> None:
        outcome.output_tokens = len(self.seen)


async def test_a_reader_sees_what_passes_and_tells_the_outcome():
    notes = Notes()
    _, _, rig = await relayed(response(b'{"a": 1}'), reader=notes)
    assert (notes.seen, rig.outcome.output_tokens) == (b'{"a": 1}', 8)


async def test_a_reader_sees_no_errors():
    notes = Notes()
    _, _, rig = await relayed(response(b"no", status=b"400 Bad"), reader=notes)
    assert (notes.seen, rig.outcome.output_tokens) == (b"", 0)


# --- the body and the plugins ------------------------------------------------------------------------------------------------


async def test_plugins_see_the_top_level_and_nothing_of_it_is_refused():
    seen: list[Any] = []
    body = {"model": "tiny", "stream": True, "cache_salt": "7", "request_id": "r", "extra_body": {"top_k": 2}, "nvext": None}
    browser, _, _ = await relayed(OK, asking=Asking(body, {"x-session-id": "s"}), plugins=[Hooks(seen.append)])
    [call] = seen
    assert browser.status == 200
    assert (call.model, call.stream, call.cache_salt, call.id, call.session_id) == ("tiny", True, "7", "r", "s")
    assert call.unclaimed == {"extra_body": Raw(b'{"top_k":2}'), "nvext": Raw(b"null")}
    assert (call.relayed, call.token_ids) == (True, [])


async def test_a_plugin_can_refuse():
    def refuse(call: Any) -> None:
        raise BadRequest("cache_salt: required here", param="cache_salt")

    browser, upstream, rig = await relayed(OK, plugins=[Hooks(refuse)])
    assert (browser.status, upstream.requests, rig.outcome.kind) == (400, [], "refused")


BODY = b'{ "model": "tiny", "seed" : 1.50, "cache_salt": "7", "messages": [ {"a" : "\\u0069"} ] }'


@pytest.mark.parametrize(
    ("changes", "sent"),
    [
        ({"cache_salt": "8"}, b'{"model":"tiny","seed":1.50,"cache_salt":"8","messages":[ {"a" : "\\u0069"} ]}'),
        ({"cache_salt": ""}, b'{"model":"tiny","seed":1.50,"messages":[ {"a" : "\\u0069"} ]}'),
        ({"adapter": "math"}, b'{"model":"math","seed":1.50,"cache_salt":"7","messages":[ {"a" : "\\u0069"} ]}'),
        ({"cache_salt": "7", "model": "tiny"}, BODY),
    ],
)
async def test_what_a_plugin_changed_is_replaced_and_every_other_value_stays_byte_for_byte(changes, sent):
    def change(call: Any) -> None:
        for name, value in changes.items():
            setattr(call, name, value)

    _, upstream, _ = await relayed(OK, asking=Asking(BODY), plugins=[Hooks(change)])
    expected = sent if sent == BODY else msgspec.json.encode(msgspec.json.decode(sent, type=dict[str, Raw]))
    assert upstream.requests[0].body == expected
    assert upstream.requests[0].values("content-length") == [str(len(expected))]


async def test_a_plugin_can_lower_a_member_for_the_chosen_worker():
    _, upstream, _ = await relayed(OK, asking=Asking({"a": 1}), plugins=[Hooks(lower=lambda request: request.update(cache_salt="v3"))])
    assert msgspec.json.decode(upstream.requests[0].body) == {"a": 1, "cache_salt": "v3"}


async def test_a_null_is_the_same_as_nothing_and_stays():
    body = b'{"model": null, "cache_salt": null, "stream": null}'
    _, upstream, _ = await relayed(OK, asking=Asking(body))
    assert upstream.requests[0].body == body


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"[1]", None),
        (b'{"a"', None),
        (b'{"model": 5}', "model"),
        (b'{"cache_salt": ["7"]}', "cache_salt"),
        (b'{"a": ' + b"[" * 600 + b"]" * 300 + b"}", None),
    ],
)
async def test_a_body_that_cant_be_routed_is_refused_here_by_its_field(body, param):
    browser, upstream, rig = await relayed(OK, asking=Asking(body, {"x-request-id": "r7"}))
    assert (browser.status, browser.json["error"]["param"], browser.headers["x-request-id"]) == (400, param, "r7")
    assert (upstream.requests, rig.witness.outcomes) == ([], [])


async def test_a_refusal_has_an_id_of_ours_where_the_client_gave_none():
    browser, _, _ = await relayed(OK, asking=Asking(b"[1]", {}))
    assert len(browser.headers["x-request-id"]) == 32


@given(
    st.one_of(st.binary(max_size=40), st.tuples(st.integers(0, len(BODY)), st.binary(max_size=3)).map(lambda cut: BODY[: cut[0]] + cut[1]))
)
def test_any_body_is_a_call_or_is_refused(body):
    try:
        call, relayed_body = parse_relayed(body, {})
    except BadRequest:
        return
    call.identity = Identity(namespace=call.cache_salt)  # as the path has it
    assert relayed_body.encode(relayed_body.lower(call)) is body


# --- which worker ------------------------------------------------------------------------------------------------------------


async def test_a_model_of_another_worker_goes_there():
    first, second = Upstream([OK]), Upstream([OK])
    async with relaying(first, second) as rig:
        rig.workers[1].info = WorkerInfo(models=("big",), model_id="big", max_model_len=100)
        browser = await Asking({"model": "big"}).ask(rig)
        unnamed = await Asking({}).ask(rig)
    assert (browser.headers["x-headrace-worker"], len(first.requests)) == ("w1", 0)
    assert (unnamed.status, unnamed.json["error"]["param"]) == (400, "model")


async def test_an_unknown_model_is_a_404():
    browser, _, _ = await relayed(OK, asking=Asking({"model": "nope"}))
    assert (browser.status, browser.json["error"]["type"]) == (404, "NotFoundError")


async def test_a_worker_without_an_http_server_gets_none():
    upstream = Upstream([OK])
    async with relaying(upstream) as rig:
        rig = Relayed(make_worker("grpc", ScriptedLane([])), *rig.workers)
        browsers = [await Asking().ask(rig) for _ in range(3)]
    assert {browser.headers["x-headrace-worker"] for browser in browsers} == {"w0"}


async def test_without_any_http_server_the_answer_says_what_to_configure():
    browser = await Asking().ask(Relayed(make_worker("grpc", ScriptedLane([]))))
    assert browser.status == 501
    assert "`http` in headrace.toml" in browser.json["error"]["message"]


async def test_an_empty_fleet_is_a_503():
    assert (await Asking().ask(Relayed())).status == 503


async def test_a_paused_worker_is_waited_for_though_another_without_http_is_ready():
    upstream = Upstream([OK])
    async with relaying(upstream) as rig, trio.open_nursery() as nursery:
        rig = Relayed(*rig.workers, make_worker("grpc", ScriptedLane([])))
        rig.move(rig.workers[0], "paused")
        browser = Asking()
        nursery.start_soon(browser.ask, rig)
        await wait_all_tasks_blocked()
        assert (browser.messages, rig.fleet.gate.waiting) == ([], 1)
        rig.move(rig.workers[0], "ready")
    assert browser.status == 200


# --- a worker is lost --------------------------------------------------------------------------------------------------------

#: What a worker may do instead of answering.
LOST = [[ABORT], [b"HTTP/1.1 20", ABORT], [chunked(EVENTS), ABORT], [b"nonsense\r\n\r\n"], [response(b"busy", status=b"503 Busy")]]


@pytest.mark.parametrize("script", LOST)
async def test_a_worker_that_is_lost_before_its_first_byte_is_replaced(script):
    bad, good = Upstream(script), Upstream([response(b'{"a":1}')])
    async with relaying(bad, good) as rig:
        browser = await Asking(BODY).ask(rig)
    assert (browser.status, browser.raw, browser.headers["x-headrace-worker"]) == (200, b'{"a":1}', "w1")
    assert (rig.outcome.kind, rig.outcome.attempts, rig.in_flight) == ("ok", 2, [0, 0])
    assert good.requests[0].body == BODY


async def test_a_server_that_nobody_listens_at_is_replaced():
    async with relaying(Upstream([ABORT]), Upstream([OK])) as rig:
        assert rig.workers[0].http
        rig.workers[0].http.base_url = "http://127.0.0.1:1"
        assert (await Asking().ask(rig)).headers["x-headrace-worker"] == "w1"


async def test_when_every_worker_is_lost_the_error_names_them():
    async with relaying(Upstream([ABORT]), Upstream([ABORT])) as rig:
        browser = await Asking().ask(rig)
    message = browser.json["error"]["message"]
    assert (browser.status, rig.outcome.kind, rig.outcome.attempts) == (503, "failed", 2)
    assert "w0 (" in message
    assert "w1 (" in message


@pytest.mark.parametrize(("workers", "retries"), [(1, 2), (2, 0), (2, 2)])
async def test_a_503_passes_as_it_is_when_no_other_worker_is_left(workers, retries):
    async with relaying(*[Upstream([response(b"paused", status=b"503 Busy")]) for _ in range(workers)], retries=retries) as rig:
        browser = await Asking().ask(rig)
    assert (browser.status, browser.raw, rig.outcome.kind) == (503, b"paused", "failed")


@pytest.mark.parametrize(
    ("head", "sent", "passed"),
    [
        (chunked(EVENTS), b"data: 1\n\n", "error event"),
        (chunked(EVENTS + b"; charset=utf-8"), b"data: 1\r\n\r\n", "error event"),
        (chunked(EVENTS), b"data: 1\n\ndata: {", "cut"),
        (chunked(EVENTS, b"content-encoding: gzip"), b"\n\n", "cut"),
        (chunked(b"content-type: application/json"), b'{"a":\n\n', "cut"),
    ],
)
async def test_an_answer_that_breaks_off_never_ends_well(head, sent, passed):
    browser, _, rig = await relayed(head, chunk(sent), ABORT)
    assert not browser.complete
    rest = browser.raw.removeprefix(sent)
    if passed == "error event":
        assert rest.endswith(b"\n\n")
        error = msgspec.json.decode(rest.removeprefix(b"data: "))["error"]
        assert (error["code"], error["type"]) == (503, "ServiceUnavailableError")
    else:
        assert rest == b""
    assert (rig.outcome.kind, rig.outcome.status, rig.in_flight) == ("failed", 503, [0])


async def test_an_answer_shorter_than_its_length_never_ends_well():
    browser, _, rig = await relayed(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf", ABORT)
    assert (browser.raw, browser.complete, browser.headers["content-length"]) == (b"half", False, "9")
    assert rig.outcome.kind == "failed"


async def test_over_http2_a_broken_stream_is_ended_because_nobody_else_would():
    browser, _, _ = await relayed(chunked(EVENTS), chunk(b"data: 1\n\n"), ABORT, asking=Asking(http="2"))
    assert browser.complete
    assert b'"code":503' in browser.raw
    assert b"[DONE]" not in browser.raw


async def test_a_worker_that_breaks_off_is_suspected():
    async with relaying(Upstream([chunked(), chunk(b"a"), ABORT])) as rig:
        await Asking().ask(rig)
        with trio.fail_after(1):
            await rig.workers[0].suspected()


# --- the client goes ---------------------------------------------------------------------------------------------------------

BEFORE, AFTER_HEAD, AFTER = [GONE], [chunked(EVENTS), GONE], [chunked(EVENTS), chunk(b"data: 1\n\n"), GONE]


@pytest.mark.parametrize("script", [BEFORE, AFTER_HEAD, AFTER])
async def test_a_client_that_goes_cancels_its_call_on_the_worker(script):
    upstream = Upstream(script)
    browser = Asking()
    async with relaying(upstream) as rig, trio.open_nursery() as nursery:
        nursery.start_soon(browser.ask, rig)
        with trio.fail_after(5):
            while not upstream.requests or (script is AFTER and not browser.raw):
                await trio.lowlevel.checkpoint()
            await wait_all_tasks_blocked()
            assert rig.in_flight == [1]
            browser.gone.set()
            await upstream.done.wait()
    assert (rig.outcome.kind, rig.outcome.status, rig.in_flight) == ("client-gone", 499, [0])


async def test_a_client_that_leaves_with_the_last_event_has_got_all_of_it():
    notes = Notes()
    upstream = Upstream([chunked(EVENTS), chunk(b"data: 1\n\n"), chunk(b"data: [DONE]\n\n"), GONE])
    browser = Asking()
    async with relaying(upstream, reader=notes) as rig, trio.open_nursery() as nursery:
        nursery.start_soon(browser.ask, rig)
        with trio.fail_after(5):
            while not browser.raw.endswith(b"data: [DONE]\n\n"):
                await trio.lowlevel.checkpoint()
            assert browser.complete
            browser.gone.set()
    assert (rig.outcome.kind, rig.outcome.status, rig.outcome.output_tokens, rig.in_flight) == ("ok", 200, 23, [0])


async def test_the_worker_is_released_though_the_client_does_not_take_what_was_sent():
    upstream = Upstream(AFTER)
    browser = Asking()
    browser.reads = trio.Event()
    async with relaying(upstream) as rig, trio.open_nursery() as nursery:
        nursery.start_soon(browser.ask, rig)
        with trio.fail_after(5):
            while not upstream.requests:
                await trio.lowlevel.checkpoint()
            await wait_all_tasks_blocked(0.05)
            browser.gone.set()
            await upstream.done.wait()  # while `send` is still pending
        assert rig.in_flight == [1]
        browser.reads.set()
    assert (rig.outcome.kind, rig.in_flight) == ("client-gone", [0])


@pytest.mark.parametrize("script", [BEFORE, AFTER])
async def test_a_shutdown_cancels_the_call_on_the_worker(script):
    upstream = Upstream(script)
    async with relaying(upstream) as rig:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(Asking().ask, rig)
            with trio.fail_after(5):
                while not upstream.requests:
                    await trio.lowlevel.checkpoint()
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        with trio.fail_after(5):
            await upstream.done.wait()
    assert (rig.outcome.kind, rig.in_flight) == ("cancelled", [0])


async def test_a_connection_whose_answer_was_read_serves_the_next_call():
    upstream = Upstream([chunked(), chunk(b"a"), chunk(b"")])
    async with relaying(upstream) as rig:
        for _ in range(3):
            assert (await Asking().ask(rig)).complete
    assert upstream.connections == 1


# --- routes ------------------------------------------------------------------------------------------------------------------


class Refusing:
    """Routes whose streamed handler refuses."""

    def __init__(self) -> None:
        async def refuse(exchange: Exchange) -> None:
            raise CallError(409, f"{exchange.request.query}")

        self.routes = Routes(max_body_bytes=10)
        self.routes.add_streamed("POST", PATH, refuse)


async def test_a_call_error_of_a_streamed_handler_is_answered():
    browser = await Asking(b"{}", query=b"a=1&b=").ask(Refusing())
    assert (browser.status, browser.json["error"]["message"]) == (409, "{'a': '1', 'b': ''}")


async def test_a_body_beyond_the_limit_is_a_413():
    assert (await Asking(b"x" * 11).ask(Refusing())).status == 413


async def test_a_client_that_goes_before_its_body_is_complete_gets_nothing():
    browser = Asking()
    browser._body = None
    browser.gone.set()
    assert (await browser.ask(Refusing())).messages == []


async def test_a_path_is_served_once():
    routes = Refusing().routes

    async def handler(_: Any) -> Any: ...

    for add in (routes.add, routes.add_streamed):
        with pytest.raises(ValueError, match="POST /v1/completions is served already"):
            add("POST", PATH, handler)


class LastRank:
    @hookimpl
    def choose_worker(self, workers) -> Choice:
        return Choice(workers[0], "last rank", workers[0].info.ranks[-1])


@pytest.mark.parametrize(("headers", "rank"), [({}, "1"), ({"x-data-parallel-rank": "0"}, "0")])
async def test_the_rank_that_a_policy_or_the_client_chooses_is_sent_once(headers, rank):
    upstream = Upstream([OK])
    async with relaying(upstream, plugins=[LastRank()], policies=["p0"]) as rig:
        [worker] = rig.workers
        assert worker.info
        worker.info = msgspec.structs.replace(worker.info, ranks=(0, 1))
        await Asking(headers=headers).ask(rig)
    [request] = upstream.requests
    assert request.values("x-data-parallel-rank") == [rank]


async def test_a_rank_that_is_none_is_refused_for_a_relayed_call_too():
    async with relaying(Upstream([OK])) as rig:
        asking = await Asking(headers={"x-data-parallel-rank": "one"}).ask(rig)
    assert (asking.status, asking.json["error"]["param"]) == (400, "x-data-parallel-rank")
