"""The connections to one worker's HTTP server, in small pools."""

from collections.abc import AsyncIterator, Callable
from typing import Final

import httpx

#: Calls that share a pool. httpcore 1.0 looks at every connection of its pool several times for each call, 5 µs a connection in all.
POOL_SIZE: Final = 32


class SmallPools(httpx.AsyncBaseTransport):
    """httpx's transport as many times as it takes: a thousand calls at once would cost 5 ms of CPU each in one pool.

    The first pool with room gets the next call, so that few calls share few connections. A further pool closes with its last call;
    the connections that it leaves idle would be closed by nobody else.
    """

    def __init__(self, open_pool: Callable[[], httpx.AsyncBaseTransport]) -> None:
        self._open_pool = open_pool
        self._pools: list[_Pool] = []

    @property
    def open_pools(self) -> int:
        """How many pools there are."""
        return len(self._pools)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """See httpx. Cancellation: the connection is closed."""
        pool = next((pool for pool in self._pools if pool.calls < POOL_SIZE), None)
        if pool is None:
            pool = _Pool(self._open_pool())
            self._pools.append(pool)
        pool.calls += 1
        try:
            response = await pool.transport.handle_async_request(request)
        except BaseException:
            await self.leave(pool)
            raise
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _Body(response.stream, self, pool)
        return response

    async def leave(self, pool: "_Pool") -> None:
        """A call of this pool has ended."""
        pool.calls -= 1
        if not pool.calls and len(self._pools) > 1:
            self._pools.remove(pool)
            await pool.transport.aclose()

    async def aclose(self) -> None:
        """Close every connection."""
        for pool in [*self._pools]:  # those that are left meanwhile go by themselves
            await pool.transport.aclose()


class _Pool:
    def __init__(self, transport: httpx.AsyncBaseTransport) -> None:
        self.transport = transport
        self.calls = 0


class _Body(httpx.AsyncByteStream):
    """A response's body; with its end the call has left its pool."""

    def __init__(self, body: httpx.AsyncByteStream, pools: SmallPools, pool: _Pool) -> None:
        self._body = body
        self._pools = pools
        self._pool: _Pool | None = pool

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._body.__aiter__()

    async def aclose(self) -> None:
        try:
            await self._body.aclose()
        finally:
            if pool := self._pool:
                self._pool = None
                await self._pools.leave(pool)
