"""The same behaviour under every host: both of hypercorn's workers, and `serve`."""

from contextlib import suppress

import httpx
import pytest
import trio
from h2.connection import H2Connection
from h2.errors import ErrorCodes

from tests.unit.serving.hosts import HOSTS, SOON, command, launched, receive_until, reset, running

MIB = 1 << 20


@pytest.fixture(params=HOSTS)
async def host(request):
    async with running(request.param) as host:
        yield host


async def test_a_request_is_answered_on_trio(host):
    async with host.client() as client:
        assert (await client.post("/echo", content=b"hello")).content == b"hello"
        assert (await client.get("/library")).text == "trio"


async def test_chunks_travel_one_by_one(host):
    async with await host.request("/two-chunks") as stream, host.client() as client:
        await receive_until(stream, b"one")
        await client.get("/tick")
        await receive_until(stream, b"two")


@pytest.mark.parametrize("when", ["", "stream"], ids=["before-the-first-byte", "mid-stream"])
@pytest.mark.parametrize("leave", [trio.SocketStream.aclose, reset], ids=["closed", "reset"])
async def test_a_client_that_leaves_ends_its_handler(host, when, leave):
    stream = await host.request(f"/wait?{when}")
    await host.event("waiting")
    await leave(stream)
    await host.event("gone=True")
    await host.event("ended")


async def test_an_http2_stream_that_is_reset_ends_its_handler_only(host):
    async with await host.connect() as stream:
        connection = H2Connection()
        connection.initiate_connection()
        headers = [(":method", "GET"), (":scheme", "http"), (":authority", "test")]
        connection.send_headers(1, [*headers, (":path", "/wait?stream")], end_stream=True)
        connection.send_headers(3, [*headers, (":path", "/two-chunks")], end_stream=True)
        await stream.send_all(connection.data_to_send())
        await host.event("waiting")
        connection.reset_stream(1, ErrorCodes.CANCEL)
        await stream.send_all(connection.data_to_send())
        await host.event("gone=True")
        async with host.client() as client:
            await client.get("/tick")
        await receive_until(stream, b"two")


async def test_http2_without_tls_is_served(host):
    async with host.client(http1=False, http2=True) as client:
        reply = await client.post("/echo", content=b"x" * MIB)
    assert (reply.http_version, len(reply.content)) == ("HTTP/2", MIB)


async def test_a_client_that_stops_reading_releases_the_upstream(host):
    async with await host.request("/flood?0.2"):
        await host.event("flooding")
        await host.event("released")


async def test_an_exception_is_a_500_and_touches_no_other_request(host):
    async with await host.request("/two-chunks") as waiting, host.client() as client:
        await receive_until(waiting, b"one")
        assert (await client.get("/fail")).status_code == 500
        await host.printed("RuntimeError: the handler failed on purpose")
        assert (await client.post("/echo", content=b"still here")).content == b"still here"
        await client.get("/tick")
        await receive_until(waiting, b"two")


async def test_32_mib_go_up_and_64_mib_come_down(host):
    async with host.client() as client:
        assert (await client.post("/size", content=b"x" * (32 * MIB))).text == str(32 * MIB)
        received = 0
        async with client.stream("GET", "/download") as reply:
            async for data in reply.aiter_raw():
                received += len(data)
    assert received == 64 * MIB


async def test_no_task_is_left_of_requests_that_ended_in_every_way(host):
    async def tasks():
        async with host.client(headers={"connection": "close"}) as client:
            return (await client.get("/tasks")).json()

    before = await tasks()
    async with host.client() as client:
        await client.get("/fail")
        await client.post("/echo", content=b"x")
    for number in range(5):
        stream = await host.request("/wait?stream")
        await host.event("waiting", number + 1)
        await reset(stream)
        await host.event("ended", number + 1)
    with trio.fail_after(SOON):
        # Hypercorn's connections take a moment to end after their handlers.
        while await tasks() != before:
            await trio.lowlevel.checkpoint()


async def test_a_websocket_is_refused(host):
    async with await host.connect() as stream:
        await stream.send_all(
            b"GET / HTTP/1.1\r\nhost: test\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
            b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
        )
        assert (await receive_until(stream, b"\r\n\r\n")).startswith(b"HTTP/1.1 403 ")


@pytest.mark.parametrize("name", HOSTS)
async def test_a_proxy_that_cannot_start_ends_the_server_with_the_reason(name):
    async with launched(command(name), env={"HOSTED_APP": "broken"}) as server:
        await server.printed("headrace could not start: ValueError: no fleet today")
        code = await server.ended()
    # Hypercorn 0.18 ends with 0 whatever its workers ended with.
    assert code == (1 if name == "serve" else 0)


async def test_a_proxy_that_fails_ends_the_server(host):
    async with host.client() as client:
        with suppress(httpx.TransportError):  # the end may overtake the answer
            await client.get("/crash")
    await host.printed("OSError: the fleet is lost")
    await host.ended()


async def test_a_port_in_use_is_named():
    async with running("serve") as first, launched(command("serve", port=first.port)) as second:
        await second.printed(rf"headrace: cannot listen on 127\.0\.0\.1:{first.port}: Address already in use")
        assert await second.ended() == 1
