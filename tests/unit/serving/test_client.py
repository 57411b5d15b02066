"""The client of a request: its body, its going, its stalling. On the virtual clock, with a scripted server."""

from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from core.beside import beside
from core.errors import CallError, ClientGone
from core.serving.client import Clients, read_body
from core.serving.inbox import Inbox

START = {"type": "http.response.start", "status": 200, "headers": []}
DISCONNECT = {"type": "http.disconnect"}


class Server:
    """The server's side of one request."""

    def __init__(self):
        self.incoming, self._receive = trio.open_memory_channel(1000)
        self.sent = []
        #: A `send` waits for it, without regard for cancellation, as hypercorn's trio worker does.
        self.taken = trio.Event()
        self.taken.set()

    async def receive(self):
        return await self._receive.receive()

    async def send(self, message):
        with trio.CancelScope(shield=True):
            await self.taken.wait()
        self.sent.append(message)

    def body(self, *chunks, more=False):
        for number, chunk in enumerate(chunks, 1):
            self.incoming.send_nowait({"type": "http.request", "body": chunk, "more_body": more or number < len(chunks)})

    def disconnect(self):
        self.incoming.send_nowait(DISCONNECT)


@pytest.fixture
def server():
    return Server()


@asynccontextmanager
async def connected(server):
    clients = Clients(stall_timeout=60)
    async with beside(clients.run), clients.connected(server.receive, server.send) as client:
        yield client


def part(body, *, more):
    return {"type": "http.response.body", "body": body, "more_body": more}


async def test_a_body_is_joined(server):
    server.body(b"one", b"", b"two")
    assert await read_body(server.receive) == b"onetwo"


async def test_a_body_of_exactly_the_limit_passes(server):
    server.body(b"12345", b"67890")
    assert await read_body(server.receive, limit=10) == b"1234567890"


async def test_a_larger_body_is_refused_with_the_limit_and_its_setting_and_read_to_its_end(server):
    server.body(b"x" * 6, b"x" * 6)
    with pytest.raises(CallError, match=r"larger than .* MiB; `max_body_mib` under \[server\]") as refused:
        await read_body(server.receive, limit=10)
    assert refused.value.status == 413
    with pytest.raises(trio.WouldBlock):
        server._receive.receive_nowait()


async def test_a_body_without_end_is_not_read_for_ever(server):
    server.body(*[b"x" * 6] * 10)
    with pytest.raises(CallError):
        await read_body(server.receive, limit=10)
    assert server._receive.statistics().current_buffer_used == 6


class Early(Inbox):
    """The inbox of a server that takes an answer before the end of the body; it notes whether the body was wanted."""

    def __init__(self):
        self.wanted = False
        super().__init__(self._note)

    async def _note(self):
        self.wanted = True


async def test_a_body_that_is_declared_too_large_is_refused_before_any_of_it_is_wanted():
    inbox = Early()
    with pytest.raises(CallError) as refused:
        await read_body(inbox, limit=10, declared="11")
    assert refused.value.status == 413
    assert not inbox.wanted


async def test_a_body_is_refused_as_soon_as_it_is_over_the_limit_where_the_server_allows_that():
    inbox, message = Early(), {"type": "http.request", "body": b"x" * 6, "more_body": True}
    for _ in range(3):
        await inbox.put(message)
    with pytest.raises(CallError) as refused:
        await read_body(inbox, limit=10)
    assert refused.value.status == 413
    assert await inbox() is message


@pytest.mark.parametrize("declared", ["10", "", "nonsense", None])
async def test_a_body_within_the_limit_is_read_whatever_is_declared(server, declared):
    server.body(b"1234567890")
    assert await read_body(server.receive, limit=10, declared=declared) == b"1234567890"


async def test_a_body_of_which_nothing_more_comes_is_a_408(server, autojump_clock):
    server.body(b"one", more=True)
    with pytest.raises(CallError, match=r"for 60 seconds; `body_timeout` under \[server\]") as refused:
        await read_body(server.receive)
    assert refused.value.status == 408
    assert trio.current_time() == pytest.approx(60)


async def test_a_slow_upload_that_goes_on_is_read(server, autojump_clock):
    async def upload():
        for number in range(10):
            await trio.sleep(50)
            server.body(b"x", more=number < 9)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(upload)
        assert await read_body(server.receive) == b"x" * 10


async def test_a_client_that_leaves_during_the_upload_is_gone(server):
    server.body(b"one", more=True)
    server.disconnect()
    with pytest.raises(ClientGone):
        await read_body(server.receive)


async def test_a_disconnect_before_the_first_byte_cancels_the_handler(server):
    async with connected(server) as client:
        server.disconnect()
        await trio.sleep_forever()
    assert client.gone
    assert not client.stalled


async def test_the_disconnect_that_follows_a_complete_reply_is_none(server):
    async with connected(server) as client:
        await client.send(START)
        await client.send(part(b"all", more=False))
        server.disconnect()
        await wait_all_tasks_blocked()
        await trio.lowlevel.checkpoint()
    assert not client.gone


async def test_a_handler_that_is_done_waits_for_nobody(server):
    async with connected(server) as client:
        await client.send(START)
        await client.send(part(b"all", more=False))
    assert [message["type"] for message in server.sent] == ["http.response.start", "http.response.body"]
    assert not client.gone


async def test_an_exception_of_the_handler_comes_out_as_it_is(server):
    with pytest.raises(ZeroDivisionError):
        async with connected(server):
            raise ZeroDivisionError


async def test_a_pinned_send_releases_the_upstream_while_it_is_still_pending(server, autojump_clock):
    released = trio.Event()

    async def handler():
        async with connected(server) as client:
            client.release = released.set
            await client.send(START)
        assert client.stalled

    async with trio.open_nursery() as nursery:
        server.taken = trio.Event()
        nursery.start_soon(handler)
        await released.wait()
        assert 60 < trio.current_time() <= 60 + 2 * 15
        assert not server.sent
        server.taken.set()


async def test_a_slow_client_that_reads_on_is_kept(server, autojump_clock):
    async with connected(server) as client:
        client.release = lambda: pytest.fail("released")
        await client.send(START)
        for _ in range(10):
            server.taken = trio.Event()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(client.send, part(b"x", more=True))
                await trio.sleep(50)
                server.taken.set()


async def test_a_long_silence_between_two_messages_is_no_stall(server, autojump_clock):
    async with connected(server) as client:
        await client.send(START)
        await trio.sleep(3600)
        await client.send(part(b"late", more=False))
    assert not client.stalled


@pytest.mark.parametrize("how", ["disconnect", "cancel"])
async def test_a_pinned_send_is_released_at_once_when_the_call_is_over(server, how):
    released = trio.Event()
    scope = trio.CancelScope()

    async def handler():
        with scope:
            async with connected(server) as client:
                client.release = released.set
                await client.send(START)

    async with trio.open_nursery() as nursery:
        server.taken = trio.Event()
        nursery.start_soon(handler)
        await wait_all_tasks_blocked()
        assert not released.is_set()
        server.disconnect() if how == "disconnect" else scope.cancel()
        await released.wait()
        server.taken.set()


# --- headrace's own end ----------------------------------------------------------------------------------------------------------


async def test_clients_are_ended_with_a_farewell_each_and_those_that_have_their_reply_without(server, autojump_clock):
    clients, said = Clients(stall_timeout=60), []

    async def answer(name, messages):
        async with clients.connected(Server().receive, server.send) as client:

            async def farewell():
                said.append((name, client.started))

            client.farewell = farewell
            for message in messages:
                await client.send(message)
            await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(answer, "new", [])
        nursery.start_soon(answer, "begun", [START])
        nursery.start_soon(answer, "whole", [START, part(b"", more=False)])
        await wait_all_tasks_blocked()
        with trio.move_on_after(0.1) as waiting:
            await clients.end()
        assert waiting.cancelled_caught  # the handler of the third goes on
        assert sorted(said) == [("begun", True), ("new", False)]
        nursery.cancel_scope.cancel()


async def test_the_end_of_clients_waits_for_their_farewells(server):
    clients, slow = Clients(stall_timeout=60), trio.Event()

    async def answer():
        async with clients.connected(server.receive, server.send) as client:
            client.farewell = slow.wait
            await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(answer)
        await wait_all_tasks_blocked()
        nursery.start_soon(clients.end)
        await wait_all_tasks_blocked()
        assert len(nursery.child_tasks) == 2
        slow.set()


async def test_a_client_that_has_gone_gets_no_farewell(server):
    clients = Clients(stall_timeout=60)
    async with clients.connected(server.receive, server.send) as client:
        client.farewell = pytest.fail
        client.leave()
        await clients.end()
    assert (client.gone, client.ended) == (True, False)
