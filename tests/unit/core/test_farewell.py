"""Calls that headrace's own end cancels: their clients are told so, as far as their answers allow it."""

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.unit.core.lanes import ScriptedLane, output
from tests.unit.core.rig import Browser, Rig, make_worker
from tests.unit.core.test_relay import EVENTS, Asking, relaying
from tests.unit.core.upstream import Upstream, chunk, chunked

ENDS = {"message": "headrace is shutting down", "type": "ServiceUnavailableError", "param": None, "code": 503}


def body(**fields):
    return {"token_ids": [1, 2, 3], "sampling_params": {}, **fields}


async def ended(rig, browser):
    """The call of a client until headrace's end, and then the rest of it."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(browser.ask, rig)
        await wait_all_tasks_blocked()
        await rig.clients.end()
    assert (rig.outcome.kind, rig.outcome.status, rig.outcome.error) == ("cancelled", 503, ENDS["message"])
    assert rig.in_flight == [0]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("state", ["ready", "paused"])
async def test_a_call_without_an_answer_gets_a_503_that_says_so(stream, state):
    lane, browser = ScriptedLane([trio.Event()]), Browser(body(stream=stream))
    await ended(Rig(make_worker("a", lane, state=state)), browser)
    assert (browser.status, browser.json, browser.headers["retry-after"]) == (503, {"error": ENDS}, "1")
    assert (lane.cancelled, "x-request-id" in browser.headers) == (state == "ready", True)


@pytest.mark.parametrize("n", [1, 2])
async def test_a_stream_that_has_begun_gets_an_error_event_and_the_usual_end(n):
    lane, browser = ScriptedLane([output(7), trio.Event()]), Browser(body(stream=True, sampling_params={"n": n}))
    await ended(Rig(make_worker("a", lane)), browser)
    assert browser.events[n:] == [{"error": ENDS}, "[DONE]"]
    assert (browser.status, browser.complete, lane.cancelled) == (200, True, n)


async def test_a_relayed_stream_that_has_begun_gets_an_error_event_and_no_good_end():
    upstream = Upstream([chunked(EVENTS), chunk(b'data: {"choices":[{"text":"a"}]}\n\n'), trio.Event()])
    async with relaying(upstream) as rig, trio.open_nursery() as nursery:
        browser = Asking()
        nursery.start_soon(browser.ask, rig)
        with trio.fail_after(5):
            while not browser.raw:
                await trio.lowlevel.checkpoint()
        await rig.clients.end()
    assert (browser.events[1:], browser.complete) == ([{"error": ENDS}], False)
    assert rig.outcome.kind == "cancelled"


async def test_a_client_that_is_not_reading_is_not_waited_for_longer_than_its_time(autojump_clock):
    rig, browser = Rig(make_worker("a", ScriptedLane([output(7), trio.Event()]))), Browser(body(stream=True))
    browser.reads = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(browser.ask, rig)
        await wait_all_tasks_blocked()
        with trio.move_on_after(0.5) as waiting:
            await rig.clients.end()
        assert waiting.cancelled_caught
        browser.reads.set()
