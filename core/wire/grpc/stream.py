"""One RPC as grpclib shows it, so that stubs generated for grpclib run on it unchanged.

Where it differs from grpclib, on purpose:

* an error status is raised by whatever receives next, not only when the context is left;
* the reply of a unary call is handed out once its end has come, so that it's never a reply of a call that failed;
* leaving the context before the end cancels the call at once; grpclib waits for the worker.
"""

from collections.abc import Generator
from types import TracebackType
from typing import Generic, Protocol, TypeVar

from grpclib.const import Cardinality, Status
from grpclib.exceptions import GRPCError, ProtocolError
from multidict import MultiDict

from core.wire.grpc.exchange import Exchange
from core.wire.grpc.headers import decode_metadata
from core.wire.grpc.messages import frame_message


class Request(Protocol):
    """What can be sent: protobuf's own messages, and betterproto2's."""

    def SerializeToString(self) -> bytes:  # noqa: N802 - protobuf's name
        """The message as bytes."""
        ...


_CLIENT_STREAMING = frozenset({Cardinality.STREAM_UNARY, Cardinality.STREAM_STREAM})

R = TypeVar("R")
S = TypeVar("S", bound=Request)


def serialize(message: Request, limit: int) -> bytes:
    """A framed message. Raises: `GRPCError` RESOURCE_EXHAUSTED when it is larger than `limit`."""
    data = message.SerializeToString()
    if len(data) > limit:
        raise GRPCError(
            Status.RESOURCE_EXHAUSTED,
            f"a message of {len(data)} bytes is over the limit of {limit} (max_message_bytes); it was not sent",
        )
    return frame_message(data)


def parse(reply_type: type[R], data: bytes) -> R:
    """A message from its bytes. Raises: `GRPCError` INTERNAL when they are none of that type."""
    try:
        return reply_type.FromString(data)  # pyright: ignore
    except Exception as error:
        raise GRPCError(Status.INTERNAL, f"the reply is no {reply_type.__name__}: {len(data)} bytes can't be decoded ({error})") from error


class _Done:
    """Nothing to wait for, for those who `await` a plain function as grpclib has them do."""

    def __await__(self) -> Generator[None]:
        return
        yield


class Stream(Generic[S, R]):
    """An RPC as an async context manager; made by `Channel.request`, begun by the first `send_…`.

    One task may send while another receives; `cancel` can be called from any task. Receiving returns without a
    checkpoint when something is there already.

    Leaving the context, normally or not, before the worker ended the call sends RST_STREAM(CANCEL) without waiting for
    anything. Cancellation of any method leaves the stream usable, except for one that sends: part of a message may have
    left, so that the stream can only be closed.

    Every method raises `GRPCError` when the call has failed (`ConnectionLost` when the transport has), and grpclib's
    `ProtocolError` when it's called out of turn.
    """

    def __init__(self, exchange: Exchange, cardinality: Cardinality, reply_type: type[R], max_message_bytes: int) -> None:
        self._exchange = exchange
        self._client_streaming = cardinality in _CLIENT_STREAMING
        self._reply_type = reply_type
        self._limit = max_message_bytes
        self._started = False
        self._message_sent = False
        self._ended = False  # our side

    async def __aenter__(self) -> "Stream[S, R]":
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._exchange.close()

    # -- sending --

    async def send_request(self, *, end: bool = False) -> None:
        """Open the call: headers and metadata. `send_message` does it when it wasn't done.

        With `end` there will be no message, which only client streams may do. Waits for a connection, and while the
        worker takes no more calls.
        """
        if self._started:
            raise ProtocolError("the request was sent already")
        if end and not self._client_streaming:
            raise ProtocolError("a unary request needs a message before its end")
        await self._start(None, end=end)

    async def send_message(self, message: S, *, end: bool = False) -> None:
        """Send a message; of a unary request it is the only one, and ends it. Waits while the worker's window is shut.

        Raises: `GRPCError` RESOURCE_EXHAUSTED when it is over `max_message_bytes`; nothing was sent then.
        """
        if self._ended or (self._message_sent and not self._client_streaming):
            raise ProtocolError("the request has ended; no further message can be sent")
        end = end or not self._client_streaming
        body = serialize(message, self._limit)
        self._message_sent = True
        if self._started:
            self._ended = end
            await self._exchange.send(body, end=end)
        else:
            await self._start(body, end=end)

    async def end(self) -> None:
        """End a client stream. Does nothing for a unary request, which its message has ended."""
        if not self._started:
            raise ProtocolError("the request was not sent yet")
        if self._client_streaming:
            if self._ended:
                raise ProtocolError("the request has ended already")
            self._ended = True
            await self._exchange.send(b"", end=True)
        elif not self._message_sent:
            raise ProtocolError("a unary request needs a message before its end")

    # -- receiving --

    async def recv_initial_metadata(self) -> None:
        """Wait until the reply has begun; `initial_metadata` is there afterwards."""
        self._check_started()
        await self._exchange.wait_for_head()
        if self._exchange.head is None:
            self._exchange.raise_for_end()

    async def recv_message(self) -> R | None:
        """The next message; None when the worker has ended the call well."""
        exchange = self._exchange
        if not exchange.messages or exchange.single_reply:
            self._check_started()
            await exchange.wait_for_reply()
            if exchange.single_reply or not exchange.messages:
                exchange.raise_for_end()
                if not exchange.messages:
                    return None
        return self._parse(exchange.take())

    async def recv_messages(self) -> list[R]:
        """All messages that have come, at least one; an empty list when the worker has ended the call well.

        What came before an error is handed out first, the error raised the next time.
        """
        exchange = self._exchange
        if not exchange.messages or exchange.single_reply:
            self._check_started()
            await exchange.wait_for_reply()
            if exchange.single_reply or not exchange.messages:
                exchange.raise_for_end()
        return [self._parse(data) for data in exchange.take_all()]

    async def recv_trailing_metadata(self) -> None:
        """Wait until the call is over; `trailing_metadata` is there afterwards. Messages not received yet are dropped."""
        self._check_started()
        await self._exchange.wait_for_end()
        self._exchange.raise_for_end()

    def __aiter__(self) -> "Stream[S, R]":
        return self

    async def __anext__(self) -> R:
        message = await self.recv_message()
        if message is None:
            raise StopAsyncIteration
        return message

    @property
    def initial_metadata(self) -> MultiDict[str | bytes] | None:
        """What came with the reply's headers; None before they came."""
        if self._exchange.head is not None:
            return decode_metadata(self._exchange.head)
        return None if self._exchange.ended is None else MultiDict()

    @property
    def trailing_metadata(self) -> MultiDict[str | bytes] | None:
        """What came with the reply's trailers, or with its only headers; None before the end."""
        ended = self._exchange.ended
        return None if ended is None else decode_metadata(ended.trailers)

    def cancel(self) -> _Done:
        """Cancel the call now, from any task: the worker gets RST_STREAM(CANCEL), whoever waits gets CANCELLED.

        Does nothing when the call is over. It's a plain function; what it returns is there for callers that `await` it,
        as grpclib has it.
        """
        self._exchange.close()
        return _Done()

    # -- private --

    async def _start(self, body: bytes | None, *, end: bool) -> None:
        self._started = True
        self._ended = end
        await self._exchange.start(body, end=end)

    def _check_started(self) -> None:
        if not self._started:
            raise ProtocolError("the request was not sent yet")

    def _parse(self, data: bytes) -> R:
        try:
            return parse(self._reply_type, data)
        except GRPCError:
            self._exchange.close()
            raise
