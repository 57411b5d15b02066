"""Restarts, shutdowns and crowds, against a real server (grpcio's) over real sockets."""

import threading
from collections.abc import Iterator

import grpc
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from core.wire.grpc import Cardinality, Channel, ChannelLimits, GRPCError, open_channel
from tests.unit.wire.servers import ECHO, Grpcio, Raw, grpcio_server, server_stream, unary


async def test_the_first_call_after_a_restart_succeeds():
    server = Grpcio(ECHO)
    port = server.start()
    async with open_channel("127.0.0.1", port, limits=ChannelLimits(reconnect_delay=0.01)) as channel:
        assert await channel.unary("/test.Test/Echo", Raw, Raw(b"1")) == b"1"
        await trio.to_thread.run_sync(server.stop)
        with trio.fail_after(5):
            while channel.connections:  # noqa: ASYNC110 - the kernel tells the channel, not us
                await trio.sleep(0.001)
        again = Grpcio(ECHO)
        again.start(port)
        try:
            assert await channel.unary("/test.Test/Echo", Raw, Raw(b"2")) == b"2"
        finally:
            await trio.to_thread.run_sync(again.stop)


async def test_a_graceful_shutdown_lets_running_calls_finish_and_refuses_new_ones():
    release = threading.Event()

    def wait(request: bytes, _: grpc.ServicerContext) -> bytes:
        assert release.wait(10)
        return request

    server = Grpcio({**ECHO, "Wait": unary(wait)})
    port = server.start()
    replies: list[bytes] = []
    async with open_channel("127.0.0.1", port) as channel, trio.open_nursery() as nursery:

        async def call() -> None:
            replies.append(await channel.unary("/test.Test/Wait", Raw, Raw(b"finished")))

        nursery.start_soon(call)
        with trio.fail_after(5):
            while not channel.calls:  # noqa: ASYNC110
                await trio.sleep(0.001)
        await channel.unary("/test.Test/Echo", Raw, Raw(b""))
        stopped = server.server.stop(grace=10)
        with pytest.raises(GRPCError):  # it depends on how far the shutdown is
            await _echo_until_refused(channel)
        assert replies == []
        release.set()
        await trio.to_thread.run_sync(stopped.wait)
    assert replies == [b"finished"]


async def _echo_until_refused(channel: Channel) -> None:
    while True:
        await channel.unary("/test.Test/Echo", Raw, Raw(b""))


async def test_500_streams_at_once_use_several_connections():
    def count(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        for index in range(3):
            yield request + b":%d" % index

    with grpcio_server({"Count": server_stream(count)}, workers=16) as server:
        seen: list[list[Raw]] = []
        most = 0

        async with open_channel("127.0.0.1", server.port) as channel, trio.open_nursery() as nursery:

            async def read(index: int) -> None:
                nonlocal most
                async with channel.request("/test.Test/Count", Cardinality.UNARY_STREAM, Raw, Raw) as stream:
                    await stream.send_message(Raw(b"%d" % index), end=True)
                    seen.append([message async for message in stream])
                    most = max(most, channel.connections)

            for index in range(500):
                nursery.start_soon(read, index)
        assert sorted(seen) == sorted([b"%d:%d" % (index, step) for step in range(3)] for index in range(500))
        assert most == 5


async def test_a_cancelled_call_is_cancelled_at_the_server():
    began, ended = threading.Event(), threading.Event()

    def wait(request: bytes, context: grpc.ServicerContext) -> bytes:
        context.add_callback(ended.set)
        began.set()
        assert ended.wait(10)
        return request

    with grpcio_server({"Wait": unary(wait)}) as server:
        async with open_channel("127.0.0.1", server.port) as channel:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(channel.unary, "/test.Test/Wait", Raw, Raw(b""))
                assert await trio.to_thread.run_sync(began.wait, 10)
                nursery.cancel_scope.cancel()
            assert await trio.to_thread.run_sync(ended.wait, 10)


async def test_the_servers_stream_limit_is_kept():
    running = threading.Semaphore(4)

    def check(request: bytes, _: grpc.ServicerContext) -> bytes:
        assert running.acquire(blocking=False), "more calls than the server allows"
        running.release()
        return request

    limits = ChannelLimits(max_connections=1)
    with grpcio_server({"Check": unary(check)}, workers=8, max_concurrent_streams=4) as server:
        async with open_channel("127.0.0.1", server.port, limits=limits) as channel:
            replies: list[bytes] = []

            async def call(index: int) -> None:
                replies.append(await channel.unary("/test.Test/Check", Raw, Raw(b"%d" % index)))

            async with trio.open_nursery() as nursery:
                for index in range(100):
                    nursery.start_soon(call, index)
                await wait_all_tasks_blocked()
                assert channel.calls <= 4
            assert len(replies) == 100
