"""The driver over memory streams, on the virtual clock: what callers see of a worker that does this or that."""

import math

import pytest
import trio
from grpclib.exceptions import ProtocolError
from h2.errors import ErrorCodes
from h2.events import ConnectionTerminated, DataReceived, PingReceived, RequestReceived, StreamReset
from trio.testing import wait_all_tasks_blocked

from core.wire.grpc import Cardinality, Channel, ChannelLimits, ConnectionLost, GRPCError, Status, channel_over
from core.wire.grpc.exchange import ATTEMPTS
from tests.unit.wire.peer import HEAD, Network, Peer, channel_to
from tests.unit.wire.servers import Raw

PATH = "/test.Test/Any"


class Outcome:
    """What became of a call made in a task of its own."""

    def __init__(self) -> None:
        self.reply: object = None
        self.error: GRPCError | None = None
        self.at = math.nan

    @property
    def over(self) -> bool:
        return not math.isnan(self.at)


def call(nursery: trio.Nursery, channel: Channel, message: bytes = b"?", **options: object) -> Outcome:
    outcome = Outcome()

    async def run() -> None:
        try:
            outcome.reply = await channel.unary(PATH, Raw, Raw(message), **options)  # type: ignore[arg-type]
        except GRPCError as error:
            outcome.error = error
        outcome.at = trio.current_time()

    nursery.start_soon(run)
    return outcome


async def serve_echo(peer: Peer) -> None:
    """Answer every call with an empty message, for ever."""
    while True:
        await peer.reply(await peer.request(), b"")


@pytest.fixture
def network():
    return Network()


async def test_calls_of_one_tick_share_one_write(network, nursery):
    async with channel_to(network) as channel:
        call(nursery, channel)
        peer = await network.accept()
        await peer.reply(await peer.request(), b"warm")
        await wait_all_tasks_blocked()
        writes = peer.writes
        for _ in range(20):
            call(nursery, channel)
        await wait_all_tasks_blocked()
        assert peer.writes == writes + 1
        await peer.read()
        assert len(peer.seen(RequestReceived)) == 20


async def test_a_deadline_ends_the_call_here_and_at_the_worker(network, nursery, autojump_clock):
    async with channel_to(network) as channel:
        outcome = call(nursery, channel, timeout=7)
        peer = await network.accept()
        request = await peer.expect(RequestReceived)
        assert dict(request.headers or ())["grpc-timeout"] == "7000m"
        event = await peer.reset()
        assert event.error_code is ErrorCodes.CANCEL
        assert trio.current_time() == pytest.approx(7)
        await wait_all_tasks_blocked()
        assert outcome.error is not None
        assert outcome.error.status is Status.DEADLINE_EXCEEDED


async def test_a_deadline_holds_while_there_is_no_connection(network, nursery, autojump_clock):
    async with channel_to(network) as channel:
        outcome = call(nursery, channel, timeout=2)
        await network.accept_silently()
        await trio.sleep(3)
        assert outcome.error is not None
        assert outcome.error.status is Status.DEADLINE_EXCEEDED
        assert outcome.at == pytest.approx(2)


async def test_a_deadline_that_has_passed_sends_nothing(network):
    async with channel_to(network) as channel:
        with pytest.raises(GRPCError) as caught:
            await channel.unary(PATH, Raw, Raw(b""), timeout=0)
    assert caught.value.status is Status.DEADLINE_EXCEEDED
    assert network.attempts == []


async def test_deadlines_of_many_calls_expire_each_at_its_time(network, nursery, autojump_clock):
    async with channel_to(network) as channel:
        outcomes = [call(nursery, channel, timeout=timeout) for timeout in (5, 1, 3, 4, 2)]
        await network.accept()
        await trio.sleep(10)
        assert [round(outcome.at) for outcome in outcomes] == [5, 1, 3, 4, 2]


async def test_cancelling_a_caller_resets_the_stream_at_once(network, nursery):
    async with channel_to(network) as channel:
        async with trio.open_nursery() as callers:
            call(callers, channel)
            peer = await network.accept()
            await peer.request()
            callers.cancel_scope.cancel()
        await wait_all_tasks_blocked()
        await peer.read()
        (event,) = peer.seen(StreamReset)
        assert event.error_code is ErrorCodes.CANCEL


async def test_leaving_a_stream_early_resets_it(network, nursery):
    peers: list[Peer] = []

    async def worker() -> None:
        peer = await network.accept()
        peers.append(peer)
        stream_id = await peer.request()
        await peer.head(stream_id)
        await peer.message(stream_id, b"1", b"2")

    async with channel_to(network) as channel:
        nursery.start_soon(worker)
        async with channel.request(PATH, Cardinality.UNARY_STREAM, Raw, Raw) as stream:
            await stream.send_message(Raw(b"?"), end=True)
            assert await stream.recv_message() == b"1"
        assert channel.calls == 0
        await peers[0].reset()


async def test_cancel_wakes_whoever_receives_and_can_be_repeated(network, nursery):
    async with channel_to(network) as channel:
        async with channel.request(PATH, Cardinality.UNARY_STREAM, Raw, Raw) as stream:
            errors: list[GRPCError] = []

            async def receive() -> None:
                try:
                    await stream.recv_message()
                except GRPCError as error:
                    errors.append(error)

            async def begin() -> None:
                await stream.send_message(Raw(b"?"), end=True)
                await receive()

            nursery.start_soon(begin)
            peer = await network.accept()
            await peer.request()
            stream.cancel()
            await stream.cancel()
            await wait_all_tasks_blocked()
            assert [error.status for error in errors] == [Status.CANCELLED]
            await peer.reset()
        await wait_all_tasks_blocked()
        assert peer.seen(StreamReset) == []


async def test_a_cancel_after_the_end_sends_nothing(network, nursery):
    async with channel_to(network) as channel:
        outcome = call(nursery, channel)
        peer = await network.accept()
        await peer.reply(await peer.request(), b"done")
        await wait_all_tasks_blocked()
        assert outcome.reply == b"done"
        async with channel.request(PATH, Cardinality.UNARY_UNARY, Raw, Raw) as stream:

            async def worker() -> None:
                await peer.reply(await peer.request(), b"again")

            nursery.start_soon(worker)
            await stream.send_message(Raw(b""))
            assert await stream.recv_message() == b"again"
            stream.cancel()
        await wait_all_tasks_blocked()
    while not peer.closed:
        await peer.read()
    assert peer.seen(StreamReset) == []


async def test_messages_that_came_before_an_error_are_handed_out_first(network, nursery):
    async def worker() -> None:
        peer = await network.accept()
        stream_id = await peer.request()
        peer.h2.send_headers(stream_id, HEAD)
        await peer.message(stream_id, b"1", b"2")
        await peer.trailers(stream_id, [("grpc-status", "14"), ("grpc-message", "paused")])

    nursery.start_soon(worker)
    async with channel_to(network) as channel, channel.request(PATH, Cardinality.UNARY_STREAM, Raw, Raw) as stream:
        await stream.send_message(Raw(b"?"), end=True)
        await wait_all_tasks_blocked()
        assert await stream.recv_messages() == [b"1", b"2"]
        with pytest.raises(GRPCError, match="paused") as caught:
            await stream.recv_messages()
    assert not isinstance(caught.value, ConnectionLost)
    assert caught.value.status is Status.UNAVAILABLE


@pytest.mark.parametrize("messages", [[], [b"1", b"2"]])
async def test_a_unary_call_wants_exactly_one_message(network, nursery, messages):
    async with channel_to(network) as channel:
        outcome = call(nursery, channel)
        peer = await network.accept()
        stream_id = await peer.request()
        await peer.head(stream_id)
        await peer.message(stream_id, *messages)
        if not messages:
            await peer.trailers(stream_id)
        await wait_all_tasks_blocked()
        assert outcome.error is not None
        assert outcome.error.status is Status.INTERNAL
        assert "message" in (outcome.error.message or "")


async def test_a_reply_that_cannot_be_decoded_is_internal(network, nursery):
    class Strict(Raw):
        @classmethod
        def FromString(cls, data: bytes) -> "Strict":  # noqa: N802
            raise ValueError("wrong wire type")

    async def worker() -> None:
        peer = await network.accept()
        await peer.reply(await peer.request(), b"xyz")

    nursery.start_soon(worker)
    async with channel_to(network) as channel:
        with pytest.raises(GRPCError, match="the reply is no Strict: 3 bytes") as caught:
            await channel.unary(PATH, Strict, Raw(b""))
    assert caught.value.status is Status.INTERNAL


async def test_sending_waits_for_the_window(nursery):
    network = Network(initial_window_size=100)
    async with channel_to(network) as channel:
        outcome = call(nursery, channel, b"x" * 1000)
        peer = await network.accept()
        peer.ack = False
        stream_id = await peer.request()
        await peer.expect(DataReceived)
        await wait_all_tasks_blocked()
        peer.h2.increment_flow_control_window(905, stream_id)
        await peer.flush()
        event = await peer.expect(DataReceived)
        assert event.stream_ended is not None
        await peer.reply(stream_id, b"got it")
        await wait_all_tasks_blocked()
        assert outcome.reply == b"got it"


async def test_a_sender_that_waits_for_the_window_can_be_cancelled(nursery):
    network = Network(initial_window_size=100)
    async with channel_to(network) as channel:
        async with trio.open_nursery() as callers:
            call(callers, channel, b"x" * 1000)
            peer = await network.accept()
            await peer.request()
            await wait_all_tasks_blocked()
            callers.cancel_scope.cancel()
        await peer.reset()
        outcome = call(nursery, channel, b"x")
        await peer.reply(await peer.request(), b"next")
        await wait_all_tasks_blocked()
        assert outcome.reply == b"next"


async def test_an_error_reply_ends_a_sender_that_waits_for_the_window(nursery):
    network = Network(initial_window_size=100)
    async with channel_to(network) as channel:
        outcome = call(nursery, channel, b"x" * 1000)
        peer = await network.accept()
        peer.ack = False
        stream_id = await peer.request()
        peer.h2.send_headers(stream_id, [*HEAD, ("grpc-status", "11"), ("grpc-message", "big")], end_stream=True)
        await peer.flush()
        await wait_all_tasks_blocked()
        assert outcome.error is not None
        assert outcome.error.status is Status.OUT_OF_RANGE


@pytest.mark.parametrize("answered", [False, True])
async def test_a_lost_connection_ends_its_calls_as_sent(network, nursery, answered):
    async with channel_to(network) as channel:
        outcome = call(nursery, channel)
        peer = await network.accept()
        stream_id = await peer.request()
        if answered:
            await peer.head(stream_id)
        await peer.close()
        await wait_all_tasks_blocked()
        assert isinstance(outcome.error, ConnectionLost)
        assert outcome.error.sent
        assert outcome.error.message == "worker:1: the worker closed the connection"
        assert channel.connections == 0


async def test_the_next_call_after_a_loss_connects_again(network, nursery):
    async with channel_to(network) as channel:
        call(nursery, channel)
        peer = await network.accept()
        await peer.request()
        await peer.close()
        await wait_all_tasks_blocked()
        outcome = call(nursery, channel)
        peer = await network.accept()
        await peer.reply(await peer.request(), b"back")
        await wait_all_tasks_blocked()
        assert outcome.reply == b"back"


async def test_garbage_from_the_worker_ends_calls_and_says_why(network, nursery):
    async with channel_to(network) as channel:
        outcome = call(nursery, channel)
        peer = await network.accept()
        await peer.request()
        await peer.raw(b"\x00\x00\x08\x00" + b"HTTP/1.1 500 oops")
        await wait_all_tasks_blocked()
        assert isinstance(outcome.error, ConnectionLost)
        assert "broke HTTP/2" in (outcome.error.message or "")


async def test_a_peer_that_speaks_no_http2_fails_the_attempt(network, nursery):
    async with channel_to(network) as channel:
        outcome = call(nursery, channel)
        peer = await network.accept_silently()
        await peer.stream.send_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await wait_all_tasks_blocked()
        assert isinstance(outcome.error, ConnectionLost)
        assert not outcome.error.sent
        assert "HTTP/2" in (outcome.error.message or "")


async def test_a_peer_that_says_nothing_fails_the_attempt_in_time(network, nursery, autojump_clock):
    async with channel_to(network, connect_timeout=3) as channel:
        outcome = call(nursery, channel)
        await network.accept_silently()
        await trio.sleep(4)
        assert outcome.at == pytest.approx(3)
        assert isinstance(outcome.error, ConnectionLost)
        assert "no HTTP/2 settings within 3 s (connect_timeout)" in (outcome.error.message or "")


async def test_a_goaway_lets_running_calls_finish_and_moves_unprocessed_ones(network, nursery):
    async with channel_to(network) as channel:
        first, second = call(nursery, channel), call(nursery, channel)
        old = await network.accept()
        one, two = await old.request(), await old.request()
        await old.goaway(min(one, two))
        new = await network.accept()
        await new.reply(await new.request(), b"new")
        await old.reply(min(one, two), b"old")
        await wait_all_tasks_blocked()
        assert {first.reply, second.reply} == {b"old", b"new"}
        await old.expect(ConnectionTerminated)
        await old.read()
        assert old.closed
        assert channel.connections == 1


async def test_calls_killed_for_going_too_fast_say_so(network, nursery):
    async with channel_to(network) as channel:
        outcome = call(nursery, channel)
        peer = await network.accept()
        stream_id = await peer.request()
        await peer.goaway(stream_id, ErrorCodes.ENHANCE_YOUR_CALM, b"too_many_resets")
        await peer.close()
        await wait_all_tasks_blocked()
        assert isinstance(outcome.error, ConnectionLost)
        assert outcome.error.sent
        assert "ENHANCE_YOUR_CALM (too_many_resets)" in (outcome.error.message or "")


async def test_a_refused_stream_is_made_again_a_few_times(network, nursery, autojump_clock):
    async with channel_to(network) as channel:
        outcome = call(nursery, channel, b"payload")
        peer = await network.accept()
        for _ in range(ATTEMPTS):
            stream_id = await peer.request()
            assert (await peer.expect(DataReceived)).data == b"\0\0\0\0\x07payload"
            peer.h2.reset_stream(stream_id, ErrorCodes.REFUSED_STREAM)
            await peer.flush()
        await wait_all_tasks_blocked()
        assert isinstance(outcome.error, ConnectionLost)
        assert not outcome.error.sent


async def test_a_refused_client_stream_is_left_to_its_caller(network, nursery):
    async def worker() -> None:
        peer = await network.accept()
        stream_id = await peer.request()
        peer.h2.reset_stream(stream_id, ErrorCodes.REFUSED_STREAM)
        await peer.flush()

    nursery.start_soon(worker)
    async with channel_to(network) as channel, channel.request(PATH, Cardinality.STREAM_STREAM, Raw, Raw) as stream:
        await stream.send_message(Raw(b"1"))
        with pytest.raises(ConnectionLost) as caught:
            await stream.recv_message()
    assert not caught.value.sent


async def test_silence_with_open_calls_is_asked_about_and_then_ends_the_connection(network, nursery, autojump_clock):
    async with channel_to(network, keepalive_interval=10, keepalive_timeout=5) as channel:
        outcome = call(nursery, channel)
        peer = await network.accept()
        await peer.request()
        begun = trio.current_time()
        await trio.sleep(20)
        assert outcome.at - begun == pytest.approx(15)
        assert isinstance(outcome.error, ConnectionLost)
        assert "no answer to a PING within 5 s (keepalive_timeout)" in (outcome.error.message or "")


async def test_an_answered_ping_keeps_the_call(network, nursery, autojump_clock):
    async with channel_to(network, keepalive_interval=10, keepalive_timeout=5) as channel:
        outcome = call(nursery, channel)
        peer = await network.accept()
        stream_id = await peer.request()
        with trio.move_on_after(100):
            while True:
                await peer.expect(PingReceived)
        assert not outcome.over
        await peer.reply(stream_id, b"at last")
        await wait_all_tasks_blocked()
        assert outcome.reply == b"at last"


async def test_a_worker_that_finds_pings_too_many_gets_half_as_many(network, nursery, autojump_clock):
    async with channel_to(network, keepalive_interval=10, keepalive_timeout=5) as channel:
        call(nursery, channel)
        peer = await network.accept()
        stream_id = await peer.request()
        await peer.expect(PingReceived)
        await peer.goaway(stream_id, ErrorCodes.ENHANCE_YOUR_CALM, b"too_many_pings")
        await peer.close()
        await wait_all_tasks_blocked()
        call(nursery, channel)
        peer = await network.accept()
        await peer.request()
        begun = trio.current_time()
        await peer.expect(PingReceived)
        assert trio.current_time() - begun == pytest.approx(20)


async def test_there_are_no_pings_without_calls(network, nursery, autojump_clock):
    async with channel_to(network, keepalive_interval=10, idle_timeout=1000) as channel:
        call(nursery, channel)
        peer = await network.accept()
        await peer.reply(await peer.request(), b"")
        with trio.move_on_after(500):
            await peer.expect(PingReceived)
            raise AssertionError("a PING came on an idle connection")
        assert channel.connections == 1


async def test_an_idle_connection_is_closed_with_a_goaway(network, nursery, autojump_clock):
    async with channel_to(network, idle_timeout=30) as channel:
        call(nursery, channel)
        peer = await network.accept()
        await peer.reply(await peer.request(), b"")
        begun = trio.current_time()
        await peer.expect(ConnectionTerminated)
        assert trio.current_time() - begun == pytest.approx(30)
        await wait_all_tasks_blocked()
        assert channel.connections == 0


async def test_leaving_the_channel_ends_its_calls_and_connections(network, nursery, autojump_clock):
    async with channel_to(network) as channel:
        outcome = call(nursery, channel)
        peer = await network.accept()
        await peer.request()
    await wait_all_tasks_blocked()
    assert isinstance(outcome.error, ConnectionLost)
    assert "the channel is closed" in (outcome.error.message or "")
    await peer.expect(ConnectionTerminated)
    await peer.read()
    assert peer.closed
    with pytest.raises(ConnectionLost, match="the channel is closed") as caught:
        await channel.unary(PATH, Raw, Raw(b""))
    assert not caught.value.sent


async def test_a_channel_whose_worker_reads_nothing_closes_in_time(nursery, autojump_clock):
    class Stuck(trio.abc.Stream):
        async def send_all(self, data: object) -> None:
            await trio.sleep_forever()

        async def wait_send_all_might_not_block(self) -> None:
            await trio.sleep_forever()

        async def receive_some(self, max_bytes: int | None = None) -> bytes:
            return await trio.sleep_forever()

        async def aclose(self) -> None:
            await trio.sleep_forever()

    async def connect() -> trio.abc.Stream:
        return Stuck()

    async with channel_over(connect, "stuck", limits=ChannelLimits(close_timeout=2)) as channel:
        call(nursery, channel)
        await wait_all_tasks_blocked()
    assert trio.current_time() <= 4 + 0.1


async def test_what_the_body_raises_leaves_the_channel_as_it_was(network):
    with pytest.raises(KeyError, match="mine"):
        async with channel_to(network):
            raise KeyError("mine")


async def test_methods_out_of_turn_are_refused(network):
    async with channel_to(network) as channel, channel.request(PATH, Cardinality.UNARY_UNARY, Raw, Raw) as stream:
        with pytest.raises(ProtocolError, match="not sent yet"):
            await stream.recv_message()
        with pytest.raises(ProtocolError, match="needs a message"):
            await stream.send_request(end=True)
        with pytest.raises(ProtocolError, match="not sent yet"):
            await stream.end()


async def test_a_message_over_the_limit_is_not_sent(network):
    async with channel_to(network, max_message_bytes=10) as channel:
        with pytest.raises(GRPCError, match=r"11 bytes is over the limit of 10 .*; it was not sent"):
            await channel.unary(PATH, Raw, Raw(bytes(11)))
    assert network.attempts == []


async def test_a_request_refused_while_it_is_sent_and_awaited_by_two_tasks_is_made_again_once(nursery, autojump_clock):
    network = Network(initial_window_size=100)
    body = bytes(range(256)) * 2
    async with channel_to(network) as channel, channel.request(PATH, Cardinality.UNARY_STREAM, Raw, Raw) as stream:
        nursery.start_soon(stream.send_message, Raw(body))
        old = await network.accept()
        old.ack = False
        await old.request()
        replies: list[Raw | None] = []

        async def receive() -> None:
            replies.append(await stream.recv_message())

        nursery.start_soon(receive)
        await wait_all_tasks_blocked()
        await old.goaway(0)
        new = await network.accept()
        stream_id = await new.request()
        got = b""
        while len(got) < len(body) + 5:
            got += (await new.expect(DataReceived)).data or b""
        assert got == b"\0" + len(body).to_bytes(4, "big") + body
        await new.reply(stream_id, b"once")
        await wait_all_tasks_blocked()
        assert replies == [b"once"]
        assert new.seen(RequestReceived) == []


async def test_a_request_refused_before_anybody_waits_is_made_again_when_somebody_does(network, nursery, autojump_clock):
    async with channel_to(network) as channel, channel.request(PATH, Cardinality.UNARY_UNARY, Raw, Raw) as stream:
        nursery.start_soon(stream.send_message, Raw(b"?"))
        old = await network.accept()
        await old.request()
        await old.goaway(0)
        await wait_all_tasks_blocked()

        async def worker() -> None:
            new = await network.accept()
            await new.reply(await new.request(), b"!")

        nursery.start_soon(worker)
        assert await stream.recv_message() == b"!"
