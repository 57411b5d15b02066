"""The inbox of a handler under `headrace serve`."""

import trio
from trio.testing import wait_all_tasks_blocked

from core.serving.client import Clients
from core.serving.inbox import Inbox

DISCONNECT = {"type": "http.disconnect"}
LAST = {"type": "http.response.body", "body": b"all", "more_body": False}


def part(number):
    return {"type": "http.request", "body": b"%d" % number, "more_body": True}


async def sent(message):
    pass


async def test_messages_come_in_their_order_and_a_cancelled_wait_loses_none():
    inbox = Inbox()
    with trio.move_on_after(0):
        await inbox()
    await inbox.put(part(1))
    await inbox.put(part(2))
    assert [await inbox(), await inbox()] == [part(1), part(2)]


async def test_whoever_puts_too_much_waits_until_there_is_room_or_nobody_reads():
    for make_room in (Inbox.__call__, Inbox.close):
        inbox = Inbox()
        for number in range(10):
            await inbox.put(part(number))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(inbox.put, part(10))
            await wait_all_tasks_blocked()
            assert len(nursery.child_tasks) == 1
            if make_room is Inbox.__call__:
                await inbox()
            else:
                inbox.close()


async def test_a_disconnect_is_said_at_once_however_much_waits():
    inbox = Inbox()
    for number in range(10):
        await inbox.put(part(number))
    await inbox.put(DISCONNECT)


async def test_a_client_that_leaves_ends_its_call_without_a_task_that_watches():
    inbox = Inbox()
    async with Clients(60).connected(inbox, sent) as client:
        tasks = trio.lowlevel.current_statistics().tasks_living
        await inbox.put(DISCONNECT)
        assert trio.lowlevel.current_statistics().tasks_living == tasks
        await trio.sleep_forever()
    assert client.gone


async def test_a_client_that_left_before_its_call_began_ends_it():
    inbox = Inbox()
    await inbox.put(DISCONNECT)
    async with Clients(60).connected(inbox, sent) as client:
        await trio.sleep_forever()
    assert client.gone


async def test_the_disconnect_that_follows_a_complete_reply_is_none():
    inbox = Inbox()
    async with Clients(60).connected(inbox, sent) as client:
        await client.send(LAST)
        await inbox.put(DISCONNECT)
        await trio.lowlevel.checkpoint()
    assert not client.gone
