"""Trio on an asyncio loop: what crosses between the two, in both directions."""

import asyncio
import contextvars
import random
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import pytest
import sniffio
import trio

from core.beside import beside
from core.serving.client import Clients
from core.serving.guest import on_asyncio

SCOPE = {"type": "http"}
MESSAGE = {"type": "http.response.body", "body": b"", "more_body": True}
VARIABLE = contextvars.ContextVar("VARIABLE", default="unset")


def on_loop(main) -> Any:
    """Run a test on asyncio; no task of it may be left."""

    def test():
        async def run():
            await asyncio.wait_for(main(), 20)
            assert asyncio.all_tasks() == {asyncio.current_task()}

        asyncio.run(run())

    test.__name__ = main.__name__
    return test


def opener(handler):
    @asynccontextmanager
    async def open_proxy():
        yield handler

    return open_proxy


async def never(*_: Any) -> Any:
    await asyncio.get_running_loop().create_future()


async def ignore(message):
    pass


@on_loop
async def test_each_side_sees_its_own_library():
    seen = []

    async def receive() -> Any:
        seen.append(sniffio.current_async_library())
        await asyncio.sleep(0)
        seen.append(sniffio.current_async_library())
        return {}

    async def handler(scope, receive, send):
        seen.append(sniffio.current_async_library())
        await receive()
        seen.append(sniffio.current_async_library())

    async with on_asyncio(opener(handler)) as app:
        await app(SCOPE, receive, ignore)
        seen.append(sniffio.current_async_library())
    assert seen == ["trio", "asyncio", "asyncio", "trio", "asyncio"]


@on_loop
async def test_a_server_that_does_not_suspend_costs_no_turn_of_the_loop():
    turns = 0
    answered = asyncio.Event()

    def count():
        nonlocal turns
        turns += 1
        if not answered.is_set():
            asyncio.get_running_loop().call_soon(count)

    async def send(message):
        pass

    async def handler(scope, receive, send):
        asyncio.get_running_loop().call_soon(count)
        for _ in range(1000):
            await send({})
        assert turns == 0
        answered.set()

    async with on_asyncio(opener(handler)) as app:
        await app(SCOPE, never, send)


@on_loop
async def test_messages_and_results_cross_whether_or_not_the_server_suspends():
    queue = asyncio.Queue(1)

    async def handler(scope, receive, send):
        for number in range(20):
            await send(number)

    async def drain():
        received = []
        for _ in range(20):
            received.append(await queue.get())
            await asyncio.sleep(0)
        return received

    async with on_asyncio(opener(handler)) as app:
        received, _ = await asyncio.gather(drain(), app(SCOPE, never, queue.put))
    assert received == list(range(20))


@on_loop
async def test_the_servers_coroutines_run_in_its_task_and_in_one_context():
    seen = []

    async def receive() -> Any:
        seen.append(asyncio.current_task())
        token = VARIABLE.set("receiving")
        await asyncio.sleep(0.001)
        seen.append(asyncio.current_task())
        VARIABLE.reset(token)
        return VARIABLE.get()

    async def handler(scope, receive, send):
        await send(await receive())

    async def send(message):
        seen.append(message)

    VARIABLE.set("server")
    async with on_asyncio(opener(handler)) as app:
        await app(SCOPE, receive, send)
    assert seen == [asyncio.current_task(), asyncio.current_task(), "server"]


@on_loop
async def test_an_exception_of_the_server_reaches_the_handler_and_back():
    async def send(message):
        await asyncio.sleep(0)
        raise ConnectionError("broken")

    async def handler(scope, receive, send):
        with pytest.raises(ConnectionError, match="broken"):
            await send({})
        raise LookupError("the handler's own")

    async with on_asyncio(opener(handler)) as app:
        with pytest.raises(LookupError, match="the handler's own"):
            await app(SCOPE, never, send)


@on_loop
async def test_cancelling_the_servers_task_cancels_the_handler_and_waits_for_it():
    events = []
    entered = asyncio.Event()

    async def handler(scope, receive, send):
        entered.set()
        try:
            await receive()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(0.01)
            events.append("cleaned up")

    async with on_asyncio(opener(handler)) as app:
        task = asyncio.ensure_future(app(SCOPE, never, ignore))
        await entered.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert events == ["cleaned up"]


@on_loop
async def test_cancelling_the_handler_cancels_what_the_server_does_for_it():
    events = []

    async def receive() -> Any:
        try:
            await never()
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            events.append("receive cancelled")
            raise

    async def handler(scope, receive, send):
        with trio.move_on_after(0.01) as scope:
            await receive()
        assert scope.cancelled_caught
        events.append("handler goes on")

    async with on_asyncio(opener(handler)) as app:
        await app(SCOPE, receive, ignore)
    assert events == ["receive cancelled", "handler goes on"]


@pytest.mark.parametrize("blocker", ["future", "task", "turn"])
def test_a_cancelled_receive_loses_no_message(blocker):
    @on_loop
    async def main():
        queue = asyncio.Queue()

        async def receive() -> Any:
            if blocker == "turn":
                while queue.empty():  # noqa: ASYNC110 - to suspend without a future is what is tested
                    await asyncio.sleep(0)
            elif blocker == "task":
                return await asyncio.create_task(queue.get())
            return await queue.get()

        async def handler(scope, receive, send):
            for _ in range(3):
                with trio.move_on_after(0.001):
                    await receive()
            await send(None)
            assert await receive() == "message"

        async def send(message):
            queue.put_nowait("message")

        async with on_asyncio(opener(handler)) as app:
            await app(SCOPE, receive, send)

    main()


@on_loop
async def test_a_receive_that_ends_as_it_is_cancelled_is_delivered_or_kept():
    """The message arrives and the scope is cancelled in one and the same turn."""
    queue = asyncio.Queue()

    async def handler(scope, receive, send):
        got = []

        async def get():
            got.append(await receive())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(get)
            await trio.testing.wait_all_tasks_blocked()
            queue.put_nowait("message")
            nursery.cancel_scope.cancel()
        if not got:
            got.append(await receive())
        assert got == ["message"]

    async with on_asyncio(opener(handler)) as app:
        await app(SCOPE, queue.get, ignore)


@on_loop
async def test_a_server_that_cancels_its_own_receive_breaks_the_request_only():
    async def receive() -> Any:
        raise asyncio.CancelledError

    async def handler(scope, receive, send):
        await receive()

    async with on_asyncio(opener(handler)) as app:
        with pytest.raises(trio.BrokenResourceError, match="the server cancelled its own"):
            await app(SCOPE, receive, ignore)
        with pytest.raises(trio.BrokenResourceError):
            await app(SCOPE, receive, ignore)


@on_loop
async def test_leaving_cancels_the_requests_that_still_run():
    entered = asyncio.Event()

    async def handler(scope, receive, send):
        entered.set()
        await trio.sleep_forever()

    async with on_asyncio(opener(handler)) as app:
        task = asyncio.ensure_future(app(SCOPE, never, ignore))
        await entered.wait()
    with pytest.raises(asyncio.CancelledError):
        await task


@on_loop
async def test_a_proxy_that_cannot_open_raises_its_error():
    @asynccontextmanager
    async def broken():
        raise ValueError("no fleet")
        yield

    with pytest.raises(ExceptionGroup) as group:
        async with on_asyncio(broken):
            pytest.fail("opened")
    assert group.group_contains(ValueError, match="no fleet")


@on_loop
async def test_a_proxy_that_fails_ends_the_body():
    failing = asyncio.Event()

    @asynccontextmanager
    async def open_proxy():
        async def fail():
            await trio.lowlevel.checkpoint()
            failing.set()
            raise OSError("lost")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(fail)
            yield never

    with pytest.raises(ExceptionGroup) as group:
        async with on_asyncio(open_proxy):
            await never()
    assert failing.is_set()
    assert group.group_contains(OSError, match="lost")


def test_a_loop_that_shuts_down_ends_the_proxy_first():
    events = []
    opened = asyncio.Event()

    @asynccontextmanager
    async def open_proxy():
        try:
            yield never
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(0.01)
            events.append("closed")

    async def main():
        async def host():
            async with on_asyncio(open_proxy):
                events.append("open")
                opened.set()
                await never()

        task = asyncio.create_task(host())
        await opened.wait()
        del task  # left to the loop's end

    asyncio.run(main())
    assert events == ["open", "closed"]


@pytest.mark.parametrize("seed", range(3))
def test_requests_that_end_in_every_way_at_any_moment_leave_nothing(seed):
    dice = random.Random(seed)

    async def handler(scope, receive, send):
        clients = Clients(0.02)
        async with beside(clients.run), clients.connected(receive, send) as client:
            for _ in range(dice.randrange(10)):
                await dice.choice((trio.lowlevel.checkpoint, partial(trio.sleep, 0.001), partial(client.send, MESSAGE)))()
                with trio.move_on_after(dice.random() / 500):
                    await client.send(MESSAGE)
            if dice.random() < 0.2:
                raise ValueError

    async def request(app):
        incoming, lock = asyncio.Queue(), asyncio.Lock()

        async def receive() -> Any:
            return await dice.choice((incoming.get, lambda: asyncio.create_task(incoming.get())))()

        async def send(message):
            async with lock:
                seconds = dice.choice((0, 0, 0.001, 0.05))
                await dice.choice((asyncio.sleep, lambda seconds: asyncio.create_task(asyncio.sleep(seconds))))(seconds)

        task = asyncio.ensure_future(app(SCOPE, receive, send))
        end = dice.choice((task.cancel, partial(incoming.put_nowait, {"type": "http.disconnect"}), int))
        asyncio.get_running_loop().call_later(dice.random() / 100, end)
        with suppress(asyncio.CancelledError, ValueError):
            await task

    @on_loop
    async def main():
        async with on_asyncio(opener(handler)) as app:
            for _ in range(10):
                await asyncio.gather(*[request(app) for _ in range(30)])

    main()
