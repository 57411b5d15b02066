"""The connections of `headrace serve`, in this process: real sockets, a virtual clock."""

import os
import resource
import socket
from contextlib import asynccontextmanager, suppress
from functools import partial

import pytest
import trio
from h2.connection import H2Connection
from h2.events import StreamEnded
from trio.testing import wait_all_tasks_blocked

from core.errors import CallError
from core.serving.client import read_body
from core.serving.connections import Connections
from tests.unit.serving.hosts import SOON, receive_until

MIB = 1 << 20
GET = b"GET / HTTP/1.1\r\nhost: test\r\n\r\n"
#: The end of a chunked response.
END = b"0\r\n\r\n"


class Served:
    """A handler, behind connections of its own."""

    def __init__(self, connections, nursery, address):
        self.connections = connections
        self.nursery = nursery
        self.address = address

    async def connect(self):
        return await trio.open_tcp_stream(*self.address)

    async def get(self):
        stream = await self.connect()
        await stream.send_all(GET)
        return stream

    def tasks(self):
        return len(self.nursery.child_tasks)


@asynccontextmanager
async def serving(handler):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        async with trio.open_nursery() as nursery:
            connections = Connections(handler, nursery)
            connections.accept(listener)
            yield Served(connections, nursery, listener.getsockname())
            nursery.cancel_scope.cancel()


@pytest.fixture
def patient_clock(autojump_clock):
    """The virtual clock jumps only when the kernel, too, has had its time to pass bytes on."""
    autojump_clock.autojump_threshold = 0.05
    return autojump_clock


async def start(send):
    await send({"type": "http.response.start", "status": 200, "headers": []})


async def body(send, data, *, more=False):
    await send({"type": "http.response.body", "body": data, "more_body": more})


async def hello(scope, receive, send):
    await start(send)
    await body(send, b"hello")


async def never(scope, receive, send):
    await trio.sleep_forever()


async def test_an_idle_connection_is_closed_after_the_keep_alive_time(patient_clock):
    async with serving(hello) as served, await served.get() as stream:
        for _ in range(2):
            await receive_until(stream, END)
            await trio.sleep(70)
            await stream.send_all(GET)
        await receive_until(stream, END)
        before = trio.current_time()
        assert await stream.receive_some() == b""
        assert trio.current_time() - before == pytest.approx(75, abs=1)


async def test_a_request_may_take_longer_than_the_keep_alive_time(patient_clock):
    async def handler(scope, receive, send):
        await read_body(receive)
        with trio.move_on_after(300):
            message = await receive()
            pytest.fail(f"told of {message}")
        await hello(scope, receive, send)

    async with serving(handler) as served, await served.get() as stream:
        with trio.fail_after(301):
            assert b"hello" in await stream.receive_some()


async def test_the_head_of_a_response_comes_with_the_first_of_its_body():
    go_on = trio.Event()

    async def handler(scope, receive, send):
        await start(send)
        await go_on.wait()
        await body(send, b"first", more=True)
        await trio.sleep_forever()

    async with serving(handler) as served, await served.get() as stream:
        await wait_all_tasks_blocked()
        with trio.move_on_after(0) as nothing:
            await stream.receive_some()
        assert nothing.cancelled_caught
        go_on.set()
        data = await stream.receive_some()
        assert data.startswith(b"HTTP/1.1 200 ")
        assert b"first" in data


async def refuse(scope, receive, send):
    """Answer by the declared length alone."""
    declared = dict(scope["headers"]).get(b"content-length", b"").decode()
    with pytest.raises(CallError) as refused:
        await read_body(receive, limit=MIB, declared=declared)
    await send({"type": "http.response.start", "status": refused.value.status, "headers": []})
    await body(send, b"refused")


@pytest.mark.parametrize("framing", [b"content-length: %d" % (16 * MIB), b"transfer-encoding: chunked"])
async def test_a_client_that_sends_on_after_its_refusal_reads_the_refusal(framing):
    async with serving(refuse) as served, await served.connect() as stream:
        await stream.send_all(b"POST / HTTP/1.1\r\nhost: test\r\n" + framing + b"\r\n\r\nfffffffffffff\r\n")
        with trio.fail_after(SOON):
            await stream.send_all(b"x" * (16 * MIB))
            answer = await receive_until(stream, END)
            assert answer.startswith(b"HTTP/1.1 413 ")
            assert b"connection: close" in answer.lower()
            assert await stream.receive_some() == b""


async def test_what_a_refused_client_sends_is_dropped_for_a_while_only(patient_clock):
    async with serving(refuse) as served, await served.connect() as stream:
        await stream.send_all(b"POST / HTTP/1.1\r\nhost: test\r\ncontent-length: %d\r\n\r\n" % (16 * MIB))
        before = trio.current_time()
        await receive_until(stream, END)
        with suppress(trio.BrokenResourceError), trio.move_on_after(60):
            while True:
                await stream.send_all(b"x")
                await trio.sleep(1)
        assert trio.current_time() - before == pytest.approx(30, abs=3)


async def test_a_client_that_waits_for_leave_is_refused_without_it():
    async with serving(refuse) as served, await served.connect() as stream:
        await stream.send_all(b"POST / HTTP/1.1\r\nhost: test\r\ncontent-length: 99999999\r\nexpect: 100-continue\r\n\r\n")
        assert (await receive_until(stream, END)).startswith(b"HTTP/1.1 413 ")


async def test_a_send_waits_for_the_reader_and_a_cancelled_one_leaves_nothing_out():
    cancelled = trio.Event()
    large = bytes(range(256)) * (16 * MIB // 256)

    async def handler(scope, receive, send):
        await start(send)
        async with trio.open_nursery() as sending:
            sending.start_soon(partial(body, send, large, more=True))
            await wait_all_tasks_blocked()
            assert sending.child_tasks
            sending.cancel_scope.cancel()
        cancelled.set()
        await body(send, b"last")

    async with serving(handler) as served, await served.get() as stream:
        await cancelled.wait()
        data = await receive_until(stream, END)
    assert large in data
    assert data.endswith(b"last\r\n" + END)


async def test_a_handler_that_does_not_read_the_body_keeps_neither_client_nor_connection():
    async with serving(hello) as served:
        before = served.tasks()
        async with await served.connect() as stream:
            await stream.send_all(b"POST / HTTP/1.1\r\nhost: test\r\ncontent-length: 99999999\r\n\r\n")
            await stream.send_all(b"x" * 9_999_999)
            assert b"hello" in await receive_until(stream, END)
            assert await stream.receive_some() == b""
        await wait_all_tasks_blocked()
        assert served.tasks() == before


async def test_a_body_that_its_handler_does_not_read_holds_up_no_other_http2_stream():
    async with serving(hello) as served, await served.connect() as stream:
        connection = H2Connection()
        connection.initiate_connection()
        head = [(":method", "POST"), (":scheme", "http"), (":authority", "test"), (":path", "/")]
        connection.send_headers(1, head)
        for _ in range(11):  # one more than wait for a handler
            connection.send_data(1, b"x")
        connection.send_headers(3, head, end_stream=True)
        await stream.send_all(connection.data_to_send())
        ended = set()
        with trio.fail_after(SOON):
            while ended != {1, 3}:
                events = connection.receive_data(await stream.receive_some())
                ended |= {event.stream_id for event in events if isinstance(event, StreamEnded)}


async def test_a_handler_that_reads_slowly_holds_its_client_back():
    go_on = trio.Event()

    async def handler(scope, receive, send):
        await go_on.wait()
        assert len(await read_body(receive)) == 32 * MIB
        await hello(scope, receive, send)

    async with serving(handler) as served, await served.connect() as stream, trio.open_nursery() as sending:
        await stream.send_all(b"POST / HTTP/1.1\r\nhost: test\r\ncontent-length: %d\r\n\r\n" % (32 * MIB))
        sending.start_soon(stream.send_all, b"x" * (32 * MIB))
        await wait_all_tasks_blocked()
        assert sending.child_tasks
        go_on.set()
        await receive_until(stream, END)


@pytest.mark.parametrize("said", [b"", GET, b"GET / HT"], ids=["nothing", "a-request", "half-a-request"])
async def test_a_client_that_closes_while_idle_leaves_nothing(said):
    async with serving(hello) as served:
        before = served.tasks()
        async with await served.connect() as stream:
            await stream.send_all(said)
            if said == GET:
                await receive_until(stream, END)
            await wait_all_tasks_blocked()
            assert served.tasks() == before + 1
        await wait_all_tasks_blocked()
        assert served.tasks() == before


async def test_a_request_that_is_cancelled_before_its_answer_is_told():
    async with serving(never) as served:
        stream = await served.get()
        await wait_all_tasks_blocked()
    async with stream:
        assert (await receive_until(stream, b"\r\n\r\n")).startswith(b"HTTP/1.1 500 ")
        assert await stream.receive_some() == b""


async def test_a_request_that_is_cancelled_because_the_server_ends_is_told_so():
    async with serving(never) as served:
        stream = await served.get()
        served.nursery.start_soon(served.connections.finish)
        await wait_all_tasks_blocked()
    async with stream:
        answer = await receive_until(stream, b"}}")
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"headrace is shutting down" in answer


async def test_what_is_not_http_is_refused_and_disturbs_nobody():
    async with serving(hello) as served, await served.connect() as other:
        async with await served.connect() as stream:
            await stream.send_all(b"\x16\x03\x01 no TLS here\r\n\r\n")
            assert (await receive_until(stream, b"\r\n\r\n")).startswith(b"HTTP/1.1 400 ")
            assert await stream.receive_some() == b""
        await other.send_all(GET)
        await receive_until(other, END)


async def test_requests_in_flight_are_finished_and_nobody_else_is_accepted():
    go_on = trio.Event()

    async def handler(scope, receive, send):
        await go_on.wait()
        await hello(scope, receive, send)

    async with serving(handler) as served, await served.connect() as idle, await served.get() as stream:
        await wait_all_tasks_blocked()
        async with trio.open_nursery() as finishing:
            finishing.start_soon(served.connections.finish)
            assert await idle.receive_some() == b""
            with pytest.raises(OSError, match="all attempts to connect"):
                await served.connect()
            go_on.set()
            await receive_until(stream, END)
            assert await stream.receive_some() == b""


async def test_a_connection_that_there_is_no_file_for_is_served_when_there_is_one():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with serving(hello) as served:
        before = served.tasks()
        client = trio.socket.socket()
        lowest_free = os.dup(client.fileno())
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
        try:
            await client.connect(served.address)
            await wait_all_tasks_blocked()
            assert served.tasks() == before
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        async with trio.SocketStream(client) as stream:
            await stream.send_all(GET)
            await receive_until(stream, END)
