"""HTTP/1.1 between the bytes of a connection and the messages of a handler, without a socket."""

import json
from typing import Any

import pytest
import trio
from hypercorn.config import Config
from hypercorn.events import Closed, RawData, Updated
from hypercorn.trio.worker_context import WorkerContext
from trio.testing import wait_all_tasks_blocked

from core.serving.http1 import HTTP1

GET = b"GET /a%20b?c=d HTTP/1.1\r\nhost: test\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nhost: test\r\ncontent-length: 4\r\n\r\n"
WAITING = POST.replace(b"\r\n\r\n", b"\r\nexpect: 100-continue\r\n\r\n")
START = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]}
CHUNKED = {"type": "http.response.start", "status": 200, "headers": []}


def body(data, *, more=False):
    return {"type": "http.response.body", "body": data, "more_body": more}


class Served:
    """One connection. `requests` are those that were begun: the scope, the handler's `send`, and what came for the handler."""

    def __init__(self):
        self.context = WorkerContext(None)
        config = Config()
        config.include_date_header = False
        self.protocol = HTTP1(config, self.context, (("127.0.0.1", 1), ("127.0.0.1", 2)), self.begin, self.take)
        self.requests: list[tuple[Any, Any, list[Any]]] = []
        self.written = b""
        self.writes = 0
        self.idle: list[bool] = []
        self.closed = False

    async def begin(self, scope, send, want):
        received = []
        self.want = want
        self.requests.append((scope, send, received))

        async def put(message):
            received.append(message)

        return put

    async def take(self, event):
        if isinstance(event, RawData):
            self.written += event.data
            self.writes += 1
        elif isinstance(event, Updated):
            self.idle.append(event.idle)
        elif isinstance(event, Closed):
            self.closed = True

    async def receive(self, data):
        await self.protocol.handle(RawData(data))

    async def answer(self, *messages):
        for message in messages:
            await self.requests[-1][1](message)


@pytest.fixture
def served():
    return Served()


async def test_a_request_becomes_a_scope_and_its_body_messages(served):
    await served.receive(POST.replace(b"POST /", b"POST /a%20b?c=d"))
    await served.receive(b"ab")
    await served.receive(b"cd")
    [(scope, _, received)] = served.requests
    assert (scope["method"], scope["path"], scope["raw_path"], scope["query_string"]) == ("POST", "/a b", b"/a%20b", b"c=d")
    assert (b"host", b"test") in scope["headers"]
    assert b"".join(message["body"] for message in received) == b"abcd"
    assert [message["more_body"] for message in received] == [True, True, False]


async def test_the_head_and_the_first_of_the_body_are_one_write_and_the_connection_is_idle_again(served):
    await served.receive(GET)
    await served.answer(START)
    assert served.writes == 0
    await served.answer(body(b"hello"), None)
    assert served.writes == 1
    assert served.written.startswith(b"HTTP/1.1 200 ")
    assert served.written.endswith(b"\r\n\r\nhello")
    assert served.idle == [False, True]
    assert not served.closed
    assert served.requests[0][2][-1] == {"type": "http.disconnect"}


async def test_a_body_without_a_length_is_chunked_and_each_part_is_written_at_once(served):
    await served.receive(GET)
    await served.answer(CHUNKED, body(b"one", more=True))
    assert served.written.endswith(b"3\r\none\r\n")
    await served.answer(body(b"two", more=True), body(b""))
    assert served.written.endswith(b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n")


@pytest.mark.parametrize(
    ("request_", "start"),
    [(GET.replace(b"GET", b"HEAD"), START), (GET, {"type": "http.response.start", "status": 204}), (GET, {**CHUNKED, "status": 304})],
)
async def test_what_has_no_body_gets_none(served, request_, start):
    await served.receive(request_)
    await served.answer(start, body(b"hello"))
    assert served.written.endswith(b"\r\n\r\n")
    assert b"hello" not in served.written
    assert served.idle == [False, True]


async def test_a_request_that_is_sent_ahead_waits_for_the_answer_to_the_one_before(served):
    async with trio.open_nursery() as nursery:
        nursery.start_soon(served.receive, GET + POST + b"abcd")
        await wait_all_tasks_blocked()
        assert len(served.requests) == 1
        await served.answer(START, body(b"first"))
        await wait_all_tasks_blocked()
        assert len(served.requests) == 2
    await served.answer(START, body(b"secnd"))
    assert served.written.count(b"HTTP/1.1 200 ") == 2


async def test_a_client_that_waits_for_leave_to_send_its_body_gets_it(served):
    await served.receive(WAITING)
    assert not served.written
    await served.want()
    assert served.written.startswith(b"HTTP/1.1 100 ")
    await served.receive(b"abcd")
    await served.answer(START, body(b"hello"))
    assert served.written.endswith(b"hello")


async def test_a_client_that_is_answered_before_its_body_is_not_asked_for_it(served):
    await served.receive(WAITING)
    await served.answer(START, body(b"hello"))
    assert served.written.startswith(b"HTTP/1.1 200 ")
    assert b"connection: close" in served.written.lower()
    assert served.closed
    assert served.protocol.unread


@pytest.mark.parametrize("request_", [GET.replace(b"1.1", b"1.0"), GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")])
async def test_the_connection_is_closed_where_the_client_wants_that(served, request_):
    await served.receive(request_)
    await served.answer(START, body(b"hello"))
    assert served.written.endswith(b"hello")
    assert served.closed


async def test_the_connection_is_closed_after_the_answer_when_the_server_ends(served):
    await served.receive(GET)
    await served.context.terminated.set()
    await served.answer(START, body(b"hello"))
    assert served.closed


async def test_an_answer_before_the_whole_body_came_closes_the_connection(served):
    await served.receive(POST + b"a")
    await served.answer(START, body(b"hello"))
    assert served.written.endswith(b"hello")
    assert served.closed


@pytest.mark.parametrize("sent", [[], [START]])
async def test_a_handler_that_ends_without_an_answer_is_a_500(served, sent):
    await served.receive(GET)
    await served.answer(*sent, None)
    assert served.written.startswith(b"HTTP/1.1 500 ")
    assert served.closed


async def test_a_handler_that_ends_when_the_next_request_has_begun_ends_only_its_own(served):
    await served.receive(GET)
    await served.answer(START, body(b"hello"))
    await served.receive(GET)
    await served.requests[0][1](None)
    await served.answer(START, body(b"hello"), None)
    assert served.written.count(b"HTTP/1.1 200 ") == 2
    assert not served.closed


async def test_a_handler_that_ends_within_its_answer_leaves_it_without_its_end(served):
    await served.receive(GET)
    await served.answer(CHUNKED, body(b"one", more=True), None)
    assert served.written.endswith(b"3\r\none\r\n")
    assert served.closed


@pytest.mark.parametrize(
    ("bytes_", "status", "says"),
    [
        (b"nonsense\r\n\r\n", 400, "not HTTP/1.1"),
        (b"\x16\x03\x01\r\n\r\n", 400, "not HTTP/1.1"),
        (b"GET / HTTP/1.1\r\nx: " + b"y" * 70_000, 431, "larger than 16384 bytes"),
        (POST.replace(b"content-length: 4", b"transfer-encoding: gzip"), 501, "only chunked"),
        (POST.replace(b"content-length: 4", b"content-length: 4\r\ntransfer-encoding: chunked"), 400, "not both"),
        (GET.replace(b"HTTP/1.1", b"HTTP/3.9"), 505, "HTTP/3.9"),
        (GET.replace(b"HTTP/1.1", b"HTTP/0.9"), 505, "HTTP/0.9"),
    ],
)
async def test_what_cannot_be_served_is_refused_in_vllms_words(served, bytes_, status, says):
    await served.receive(bytes_)
    head, _, content = served.written.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert b"content-type: application/json" in head
    error = json.loads(content)["error"]
    assert (error["code"], says in error["message"]) == (status, True)
    assert served.closed
    assert not served.requests


async def test_a_head_request_whose_handler_fails_is_refused_without_a_body(served):
    await served.receive(GET.replace(b"GET", b"HEAD"))
    await served.answer(None)
    assert served.written.startswith(b"HTTP/1.1 500 ")
    assert served.written.endswith(b"\r\n\r\n")
    assert served.closed


async def test_empty_lines_before_a_request_are_nothing(served):
    for part in (b"\r", b"\n", b"\r\n" + GET):
        await served.receive(part)
    await served.answer(START, body(b"hello"))
    assert served.written.endswith(b"hello")


@pytest.mark.parametrize("apart", [False, True])
async def test_empty_lines_after_a_body_are_nothing(served, apart):
    async with trio.open_nursery() as nursery:
        nursery.start_soon(served.receive, POST + b"abcd\r\n" + (b"" if apart else POST + b"efgh"))
        await wait_all_tasks_blocked()
        await served.answer(START, body(b"first"))
    if apart:
        await served.receive(POST + b"efgh")
    await served.answer(START, body(b"secnd"))
    assert served.written.count(b"HTTP/1.1 200 ") == 2
    assert [b"".join(message.get("body", b"") for message in received) for _, _, received in served.requests] == [b"abcd", b"efgh"]


async def test_a_client_that_goes_after_an_empty_line_is_told_to_the_handler(served):
    with trio.fail_after(5):
        await served.receive(POST + b"abcd\r\n")
    await served.protocol.handle(Closed())
    assert served.requests[0][2][-1] == {"type": "http.disconnect"}


async def test_a_body_that_breaks_its_framing_ends_the_request(served):
    await served.receive(POST.replace(b"content-length: 4", b"transfer-encoding: chunked") + b"zz\r\n")
    assert served.written.startswith(b"HTTP/1.1 400 ")
    assert served.closed
    assert served.requests[0][2][-1] == {"type": "http.disconnect"}


async def test_a_client_that_goes_is_told_to_the_handler_and_nothing_is_written_to_it(served):
    await served.receive(GET)
    await served.answer(CHUNKED, body(b"one", more=True))
    await served.receive(b"")
    await served.protocol.handle(Closed())
    assert served.requests[0][2][-1] == {"type": "http.disconnect"}
    written = served.written
    await served.answer(body(b"two", more=True), None)
    assert served.written == written


async def test_a_message_out_of_turn_is_the_handlers_error(served):
    await served.receive(GET)
    with pytest.raises(RuntimeError, match=r"http\.response\.body out of turn"):
        await served.answer(body(b"hello"))
