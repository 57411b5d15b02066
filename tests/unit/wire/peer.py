"""The worker's end of a connection, driven step by step by a test: h2 on its side, over memory streams."""

from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import trio
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, Event, RequestReceived, StreamReset
from h2.settings import SettingCodes
from hyperframe.frame import GoAwayFrame
from trio.testing import memory_stream_pair

from core.wire.grpc import Channel, ChannelLimits, channel_over
from core.wire.grpc.messages import frame_message

E = TypeVar("E", bound=Event)

HEAD = [(":status", "200"), ("content-type", "application/grpc")]
OK = [("grpc-status", "0")]


def new_server(**settings: int) -> H2Connection:
    """h2's server side, its preface not taken yet."""
    connection = H2Connection(H2Configuration(client_side=False, header_encoding="utf-8"))
    connection.local_settings.update({SettingCodes[name.upper()]: value for name, value in settings.items()})
    connection.local_settings.acknowledge()
    connection.initiate_connection()
    return connection


class Peer:
    """One connection as the worker sees it."""

    def __init__(self, stream: trio.abc.Stream, **settings: int) -> None:
        self.stream = stream
        self.h2 = new_server(**settings)
        self.closed = False
        self.writes = 0
        self._events: deque[Event] = deque()
        self.ack = True

    async def flush(self) -> None:
        if data := self.h2.data_to_send():
            await self.stream.send_all(data)

    async def read(self) -> None:
        """Take what the client has sent; wait for something if there is nothing."""
        data = await self.stream.receive_some()
        if not data:
            self.closed = True
        for event in self.h2.receive_data(data) if data else []:
            self._events.append(event)
            if self.ack and isinstance(event, DataReceived):
                assert event.flow_controlled_length is not None
                self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        await self.flush()

    async def expect(self, kind: type[E], **fields: Any) -> E:
        """The next event of this kind (with these attributes); others on the way are dropped."""
        while True:
            while self._events:
                event = self._events.popleft()
                if isinstance(event, kind) and all(getattr(event, name) == value for name, value in fields.items()):
                    return event
            assert not self.closed, f"the client closed the connection; no {kind.__name__} came"
            await self.read()

    def seen(self, kind: type[E]) -> list[E]:
        """Events of this kind that were read and not dropped yet."""
        return [event for event in self._events if isinstance(event, kind)]

    async def request(self) -> int:
        """The id of the next call."""
        return (await self.expect(RequestReceived)).stream_id

    async def reset(self) -> StreamReset:
        return await self.expect(StreamReset)

    async def head(self, stream_id: int) -> None:
        self.h2.send_headers(stream_id, HEAD)
        await self.flush()

    async def message(self, stream_id: int, *messages: bytes) -> None:
        for message in messages:
            self.h2.send_data(stream_id, frame_message(message))
        await self.flush()

    async def trailers(self, stream_id: int, trailers: list[tuple[str, str]] = OK) -> None:
        self.h2.send_headers(stream_id, trailers, end_stream=True)
        await self.flush()

    async def reply(self, stream_id: int, *messages: bytes) -> None:
        await self.head(stream_id)
        await self.message(stream_id, *messages)
        await self.trailers(stream_id)

    async def goaway(self, last_stream_id: int, code: int = 0, debug: bytes = b"") -> None:
        """As a frame of its own: h2 would take the connection for closed."""
        frame = GoAwayFrame(0, last_stream_id=last_stream_id, error_code=code, additional_data=debug)
        await self.stream.send_all(frame.serialize())

    async def raw(self, data: bytes) -> None:
        await self.flush()
        await self.stream.send_all(data)

    async def close(self) -> None:
        await self.stream.aclose()


class Network:
    """Hands each connection that the channel makes to the test, or refuses it."""

    def __init__(self, **settings: int) -> None:
        self.settings = settings
        self.refuse = False
        self.attempts: list[float] = []
        self._sender, self._receiver = trio.open_memory_channel[Peer](1000)

    async def connect(self) -> trio.abc.Stream:
        self.attempts.append(trio.current_time())
        if self.refuse:
            await trio.lowlevel.checkpoint()
            raise OSError("refused by the test")
        ours, theirs = memory_stream_pair()
        peer = Peer(theirs, **self.settings)

        pump = ours.send_stream.send_all_hook
        assert pump is not None

        async def pump_and_count() -> None:
            peer.writes += 1
            await pump()

        ours.send_stream.send_all_hook = pump_and_count
        self._sender.send_nowait(peer)
        return ours

    async def accept(self) -> Peer:
        """The next connection, with the worker's settings sent."""
        peer = await self._receiver.receive()
        await peer.flush()
        return peer

    async def accept_silently(self) -> Peer:
        return await self._receiver.receive()


@asynccontextmanager
async def channel_to(network: Network, **limits: Any) -> AsyncIterator[Channel]:
    async with channel_over(network.connect, "worker:1", limits=ChannelLimits(**limits)) as channel:
        yield channel
