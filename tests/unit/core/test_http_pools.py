"""Small pools: how many there are, and that a call leaves its own whatever its end."""

from contextlib import asynccontextmanager

import httpx
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from core.wire.http_pools import POOL_SIZE, SmallPools
from tests.unit.core.upstream import ABORT, Upstream, response, upstream_worker

OK = response(b"{}")


@asynccontextmanager
async def client_of(upstream: Upstream):
    pools = SmallPools(httpx.AsyncHTTPTransport)
    async with upstream_worker("w0", upstream) as worker:
        assert worker.http
        async with httpx.AsyncClient(base_url=worker.http.base_url, transport=pools, timeout=None) as client:
            yield client, pools


async def test_calls_one_after_the_other_share_a_connection():
    upstream = Upstream([OK])
    async with client_of(upstream) as (client, pools):
        for _ in range(3):
            assert (await client.get("/")).content == b"{}"
        assert (pools.open_pools, upstream.connections) == (1, 1)


async def test_a_further_pool_opens_when_one_is_full_and_closes_with_its_last_call():
    go = trio.Event()
    async with client_of(Upstream([go, OK])) as (client, pools), trio.open_nursery() as nursery:
        for _ in range(2 * POOL_SIZE + 1):
            nursery.start_soon(client.get, "/")
        await wait_all_tasks_blocked(0.05)
        assert pools.open_pools == 3
        go.set()
        with trio.fail_after(5):
            while pools.open_pools > 1:
                await trio.lowlevel.checkpoint()


@pytest.mark.parametrize("script", [[ABORT], [b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf", ABORT]])
async def test_a_call_that_fails_leaves_its_pool(script):
    async with client_of(Upstream(script)) as (client, pools):
        for _ in range(POOL_SIZE + 1):
            with pytest.raises(httpx.TransportError):
                await client.get("/")
        assert pools.open_pools == 1


@pytest.mark.parametrize("head", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf"])
async def test_a_call_that_is_cancelled_leaves_its_pool(head):
    async with client_of(Upstream([head, trio.Event()])) as (client, pools):
        for _ in range(2):
            async with trio.open_nursery() as nursery:
                for _ in range(POOL_SIZE):
                    nursery.start_soon(client.get, "/")
                await wait_all_tasks_blocked(0.05)
                assert pools.open_pools == 1
                nursery.cancel_scope.cancel()


async def test_a_stream_that_is_left_early_leaves_its_pool():
    async with client_of(Upstream([b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf", trio.Event()])) as (client, pools):
        for _ in range(POOL_SIZE + 1):
            async with client.stream("GET", "/"):
                assert pools.open_pools == 1
