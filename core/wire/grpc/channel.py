"""The channel: one worker, as many connections as its calls need."""

import math
import ssl
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TypeVar

import trio
from grpclib.const import Cardinality
from grpclib.metadata import Deadline

from core.tls import TLSFiles
from core.wire.grpc.connection import Connect
from core.wire.grpc.exchange import Exchange
from core.wire.grpc.headers import MetadataLike, encode_metadata, request_headers
from core.wire.grpc.limits import DEFAULT_LIMITS, ChannelLimits
from core.wire.grpc.pool import Pool
from core.wire.grpc.stream import Request, Stream, parse, serialize

_PROTOCOLS = ("h2",)
_SINGLE_REPLY = frozenset({Cardinality.UNARY_UNARY, Cardinality.STREAM_UNARY})

R = TypeVar("R")
S = TypeVar("S", bound=Request)


class Channel:
    """Calls to one worker; opened by `open_channel`. Has what grpclib's stubs need of a channel."""

    def __init__(self, pool: Pool, authority: str, scheme: str, limits: ChannelLimits) -> None:
        self._pool = pool
        self._authority = authority
        self._scheme = scheme
        self._limits = limits
        self._headers: dict[str, list[tuple[bytes, bytes]]] = {}

    def __repr__(self) -> str:
        return f"<Channel to {self._authority}: {self.calls} calls on {self.connections} connections>"

    @property
    def connections(self) -> int:
        """Connections that are up."""
        return self._pool.connections

    @property
    def calls(self) -> int:
        """Calls that are open on them."""
        return self._pool.calls

    def request(
        self,
        name: str,
        cardinality: Cardinality,
        request_type: type[S],  # noqa: ARG002 - the messages know their type; grpclib's signature
        reply_type: type[R],
        *,
        timeout: float | None = None,
        deadline: Deadline | None = None,
        metadata: MetadataLike | None = None,
    ) -> Stream[S, R]:
        """An RPC to use as an async context manager; nothing is sent yet. `name` is the path, `/package.Service/Method`.

        `timeout` (seconds) counts from now; with `deadline` (grpclib's) as well, the earlier one holds. It goes to the
        worker as `grpc-timeout`; when it passes here, the call is cancelled and ends with DEADLINE_EXCEEDED. None: no
        limit but the caller's own cancel scopes.

        Raises: `ValueError` or `TypeError` for metadata that can't be sent.
        """
        exchange = self._exchange(name, timeout, deadline, metadata, single_reply=cardinality in _SINGLE_REPLY)
        return Stream(exchange, cardinality, reply_type, self._limits.max_message_bytes)

    async def unary(
        self,
        name: str,
        reply_type: type[R],
        message: Request,
        *,
        timeout: float | None = None,
        deadline: Deadline | None = None,
        metadata: MetadataLike | None = None,
    ) -> R:
        """Make a call with one message each way: the short form of `request`, and the fast one.

        Cancellation: the worker gets RST_STREAM(CANCEL) at once.

        Raises: `GRPCError` for whatever the call ended with, `ConnectionLost` when the transport failed.
        """
        body = serialize(message, self._limits.max_message_bytes)
        exchange = self._exchange(name, timeout, deadline, metadata, single_reply=True)
        try:
            await exchange.start(body, end=True)
            await exchange.wait_for_reply()
            exchange.raise_for_end()
            return parse(reply_type, exchange.take())
        finally:
            exchange.close()

    async def settle(self) -> None:
        """Wait until the worker has read every cancellation of a call that was made so far. Cancellation: safe."""
        await self._pool.settle()

    def _exchange(
        self,
        name: str,
        timeout: float | None,
        deadline: Deadline | None,
        metadata: MetadataLike | None,
        *,
        single_reply: bool,
    ) -> Exchange:
        headers = self._headers.get(name)
        if headers is None:
            headers = self._headers[name] = request_headers(name, self._authority, self._scheme)
        if metadata:
            headers = headers + encode_metadata(metadata)
        limit = math.inf if timeout is None else timeout
        if deadline is not None:
            limit = min(limit, deadline.time_remaining())
        at = math.inf if limit == math.inf else trio.current_time() + limit
        return Exchange(self._pool, headers, deadline=at, single_reply=single_reply)


@asynccontextmanager
async def open_channel(
    host: str, port: int, *, tls: TLSFiles | None = None, limits: ChannelLimits = DEFAULT_LIMITS
) -> AsyncGenerator[Channel]:
    """A channel to the worker at `host:port`; plaintext unless `tls` is given.

    Nothing is connected until the first call. Leaving the context ends all calls (they raise `ConnectionLost`) and
    closes all connections within `limits.close_timeout`.

    Cancellation: the same, with the close shielded for that time.

    Raises: `ValueError` for TLS files that can't be used.
    """
    context = None if tls is None else await trio.to_thread.run_sync(tls.context, _PROTOCOLS)
    server_name = (tls.server_name if tls is not None else None) or host

    async def connect() -> trio.abc.Stream:
        stream = await trio.open_tcp_stream(host, port)
        return stream if context is None else await _secure(stream, context, server_name)

    authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    async with channel_over(connect, authority, scheme="https" if tls else "http", limits=limits) as channel:
        yield channel


@asynccontextmanager
async def channel_over(
    connect: Connect, authority: str, *, scheme: str = "http", limits: ChannelLimits = DEFAULT_LIMITS
) -> AsyncGenerator[Channel]:
    """A channel over whatever transports `connect` makes; otherwise like `open_channel`."""
    failure: BaseException | None = None
    try:
        async with trio.open_nursery() as nursery:
            pool = Pool(nursery, connect, limits, authority)
            nursery.start_soon(pool.deadlines.run)
            try:
                yield Channel(pool, authority, scheme, limits)
            except BaseException as error:
                failure = error
                raise
            finally:
                with trio.move_on_after(limits.close_timeout, shield=True):
                    await pool.close()
                nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        # The nursery is our own affair: what the body raised leaves as it was.
        if failure is not None and group.exceptions == (failure,):
            raise failure from failure.__cause__
        raise


async def _secure(stream: trio.SocketStream, context: ssl.SSLContext, server_name: str) -> trio.abc.Stream:
    # https_compatible: HTTP/2 says itself where things end, so a peer that skips TLS's goodbye is no error.
    secure = trio.SSLStream(stream, context, server_hostname=server_name, https_compatible=True)
    try:
        await secure.do_handshake()
        _check_protocol(secure.selected_alpn_protocol())
    except BaseException as error:
        await trio.aclose_forcefully(stream)
        if isinstance(error.__cause__, ssl.SSLError):
            raise trio.BrokenResourceError(f"the TLS handshake failed: {error.__cause__}") from error
        raise
    return secure


def _check_protocol(chosen: str | None) -> None:
    if chosen not in _PROTOCOLS:
        raise trio.BrokenResourceError(f"the worker's TLS does not offer HTTP/2 (ALPN h2); it chose {chosen!r}")
