"""Calls that are ended by their id: at the gate here, and on workers by every id that these know them by."""

import msgspec
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from core.call import Call
from core.hookspecs import hookimpl
from core.path import Path
from tests.unit.core.lanes import ScriptedLane, output
from tests.unit.core.rig import Browser, Rig, make_worker


def body(**fields):
    return {"token_ids": [1, 2, 3], "sampling_params": {}, **fields}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
async def test_a_call_that_is_aborted_at_the_gate_ends_as_one_that_a_worker_has_not_begun(stream, n):
    lane = ScriptedLane([output(7, finish="stop")])
    rig = Rig(make_worker("a", lane, state="paused"))
    sent = body(request_id="r1", sampling_params={"n": n}, stream=stream, return_token_ids=True)
    browsers = [Browser(sent), Browser(body(request_id="r2"))]
    async with trio.open_nursery() as nursery:
        for browser in browsers:
            nursery.start_soon(browser.ask, rig)
        await wait_all_tasks_blocked()
        rig.fleet.aborts.end_waiting(["r1", "r9"])
        await wait_all_tasks_blocked()
        assert (browsers[0].status, browsers[0].complete, rig.fleet.gate.waiting) == (200, True, 1)
        rig.move(rig.workers[0], "ready")
    replies = browsers[0].events[:-1] if stream else [browsers[0].json]
    choices = [choice for reply in replies for choice in reply["choices"]]
    assert [(choice["index"], choice["token_ids"], choice["finish_reason"]) for choice in choices] == [(i, [], "abort") for i in range(n)]
    assert replies[0]["prompt_token_ids"] == [1, 2, 3]
    if not stream:
        assert (replies[0]["model"], replies[0]["usage"]["prompt_tokens"], replies[0]["usage"]["completion_tokens"]) == ("tiny", 3, 0)
    assert (browsers[1].status, len(lane.requests)) == (200, 1)
    assert [(outcome.kind, outcome.status) for outcome in rig.witness.outcomes] == [("ok", 200)] * 2


async def test_of_a_call_that_is_aborted_at_the_gate_there_is_nothing_to_lift():
    class Fails:
        @hookimpl
        def lift_result(self) -> None:
            raise AssertionError

        @hookimpl
        def lift_output(self) -> None:
            raise AssertionError

    rig = Rig(make_worker("a", ScriptedLane(), state="paused"), plugins=[Fails()])
    browsers = [Browser(body(request_id="r1", stream=stream)) for stream in (False, True)]
    async with trio.open_nursery() as nursery:
        for browser in browsers:
            nursery.start_soon(browser.ask, rig)
        await wait_all_tasks_blocked()
        rig.fleet.aborts.end_waiting(["r1"])
    assert [browser.status for browser in browsers] == [200, 200]


async def test_a_part_of_a_call_that_waits_for_a_worker_is_aborted_with_it():
    class Prefills:
        path: Path

        @hookimpl
        async def begin_attempt(self, call: Call) -> None:
            await self.path.leg(msgspec.structs.replace(call, role="prefill"))

    prefills = Prefills()
    rig = Rig(make_worker("a", ScriptedLane()), make_worker("p", ScriptedLane(), role="prefill", state="paused"), plugins=[prefills])
    prefills.path = rig.path
    browser = Browser(body(request_id="r1"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(browser.ask, rig)
        await wait_all_tasks_blocked()
        rig.fleet.aborts.end_waiting(["r1"])
    assert browser.json["choices"][0]["finish_reason"] == "abort"


async def test_workers_know_the_outputs_of_a_call_by_ids_of_their_own_while_it_runs():
    more = trio.Event()
    rig = Rig(make_worker("a", ScriptedLane([more, output(7, finish="stop")])))
    async with trio.open_nursery() as nursery:
        for n in (2, 3, 1):
            nursery.start_soon(Browser(body(request_id=f"r{n}" if n == 1 else "r", sampling_params={"n": n})).ask, rig)
        await wait_all_tasks_blocked()
        assert rig.fleet.aborts.known_as(["r", "r1", "x"]) == ["r", "r1", "x", "r-0", "r-1", "r-2"]
        more.set()
    assert rig.fleet.aborts.known_as(["r"]) == ["r"]
