"""The two ways to a worker, opened together: its gRPC channel and its HTTP client."""

import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import httpx
import trio

from core.fleet.probe import GrpcProbe, HttpProbe, ProbeFailed, RouteClosed, as_grpclib
from core.settings import WorkerSettings, split_address
from core.wire import Channel, open_channel
from core.wire.generated.vllm import ControlStub
from core.wire.grpc_lane import GrpcLane
from core.wire.http_lane import HttpLane
from core.wire.http_pools import SmallPools
from core.wire.lane import Lane

#: vLLM's HTTP server closes a connection that was idle for 5 s; ours are given up before, so that no call meets one that closes.
_IDLE_SECONDS = 4.0
_CONNECT_SECONDS = 10.0
_SETTLE_SECONDS = 1.0
_PROTOCOLS = ("http/1.1",)


class Connection:
    """A worker's channels and client; at least one kind is there.

    What administers the worker has a channel of its own, so that it never queues behind calls.
    """

    def __init__(self, calls: Channel | None, administration: Channel | None, client: httpx.AsyncClient | None) -> None:
        self._channel = calls
        self._http = HttpProbe(client) if client else None
        #: For administration, by whoever has reason to; `None` where the settings name no such server.
        self.control = ControlStub(as_grpclib(administration)) if administration else None
        self.http = client
        self.probe: GrpcProbe | HttpProbe
        if administration:
            self.probe = GrpcProbe(administration)
        else:
            assert self._http
            self.probe = self._http

    async def settle(self) -> None:
        """Wait, for a second at most, until the worker has read the cancellations of calls over gRPC that were sent so far.

        HTTP/1 cancels by closing a connection, which nobody confirms.
        """
        if self._channel:
            with trio.move_on_after(_SETTLE_SECONDS):
                await self._channel.settle()

    async def lanes(self, max_model_len: int) -> tuple[tuple[Lane, ...], str]:
        """What calls can go over, gRPC first; and why not over HTTP, when there is a server that doesn't take any.

        Raises: `ProbeFailed` when there is none at all, or when a server that the settings name can't be reached: what it alone could
        serve would be refused for as long as the worker lives.
        """
        lanes: list[Lane] = []
        closed = ""
        if self._channel:
            lanes.append(GrpcLane(self._channel, max_model_len=max_model_len))
        if self.http and self._http:
            try:
                lanes.append(HttpLane(self.http, can=await self._http.generate_can(), max_model_len=max_model_len))
            except RouteClosed as error:
                closed = str(error)
                if not lanes:
                    raise ProbeFailed(closed, certain=True) from error
        return tuple(lanes), closed


@asynccontextmanager
async def connect(settings: WorkerSettings) -> AsyncGenerator[Connection, None]:
    """Open what the settings name. Nothing is sent yet; leaving it closes every connection and ends the calls on them.

    Raises: `ValueError` for TLS files that can't be used.
    """
    async with AsyncExitStack() as stack:
        calls = administration = client = None
        if settings.grpc:
            host, port = split_address(settings.grpc)
            calls = await stack.enter_async_context(open_channel(host, port, tls=settings.tls))
            administration = await stack.enter_async_context(open_channel(host, port, tls=settings.tls))
        if settings.http:
            client = await stack.enter_async_context(_client(settings, settings.http))
        yield Connection(calls, administration, client)


def _client(settings: WorkerSettings, url: str) -> httpx.AsyncClient:
    headers: dict[str, str] = {}
    if settings.api_key_env:
        headers["authorization"] = f"Bearer {os.environ.get(settings.api_key_env, '')}"
    # Workers are inside: a proxy from the environment must not come between.
    open_pool = partial(
        httpx.AsyncHTTPTransport,
        verify=tls.context(_PROTOCOLS) if (tls := settings.tls) else httpx.create_ssl_context(trust_env=False),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=_IDLE_SECONDS),
        trust_env=False,
    )
    # A rollout may take hours; who gives up is the client.
    timeout = httpx.Timeout(None, connect=_CONNECT_SECONDS)
    return httpx.AsyncClient(
        base_url=url,
        headers=headers,
        transport=SmallPools(open_pool),
        event_hooks=_naming(tls.server_name) if tls and tls.server_name else {},
        timeout=timeout,
        trust_env=False,
    )


def _naming(server: str) -> dict[str, list[Callable[[httpx.Request], Awaitable[None]]]]:
    """Say with each request which name the worker's certificate must carry."""

    async def name(request: httpx.Request) -> None:
        request.extensions = {**request.extensions, "sni_hostname": server}

    return {"request": [name]}
