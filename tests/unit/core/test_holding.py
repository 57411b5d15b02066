"""What attempts begin with, and calls that stay on their worker until their first output though their client has gone."""

from collections.abc import Awaitable
from typing import Any

import pytest
import trio
from msgspec.structs import replace
from trio.testing import wait_all_tasks_blocked

from core.call import Call, SamplingParams
from core.errors import CallError, WorkerLost, WorkerPaused
from core.hookspecs import hookimpl
from core.reply import Logprobs, TokenLogprob
from tests.unit.core.lanes import ScriptedLane, output
from tests.unit.core.rig import Browser, Rig, make_worker

BODY = {"token_ids": [1, 2, 3], "sampling_params": {"logprobs": 0}}
FAILED = CallError(500, "engine failed during generation")


class Begins:
    """Every attempt goes to its worker with these fields, after `before` has happened."""

    def __init__(self, before: trio.Event | None = None, **fields: Any) -> None:
        self.count = 0
        self._before = before
        self._fields = fields

    @hookimpl
    def begin_attempt(self, call: Call) -> Awaitable[Call]:
        return self.begin(call)

    async def begin(self, call: Call) -> Call:
        self.count += 1
        if self._before is not None:
            await self._before.wait()
        return replace(call, **self._fields)


def held(**fields: Any) -> Begins:
    return Begins(hold=10.0, stream=True, **fields)


async def ask(rig: Rig, **body: Any) -> Browser:
    return await Browser({**BODY, **body}).ask(rig)


async def leave(rig: Rig, nursery: trio.Nursery, **body: Any) -> None:
    """Ask, and go as soon as nothing moves."""
    browser = Browser({**BODY, **body})
    nursery.start_soon(browser.ask, rig)
    await wait_all_tasks_blocked()
    browser.gone.set()
    await wait_all_tasks_blocked()


async def test_a_held_call_whose_client_has_gone_is_cancelled_with_its_first_output_and_no_sooner():
    for stream in (False, True):
        first = trio.Event()
        lane = ScriptedLane([first, output(7), trio.Event()])
        rig = Rig(make_worker("a", lane), plugins=[held()])
        async with trio.open_nursery() as nursery:
            await leave(rig, nursery, stream=stream)
            assert (lane.open, lane.cancelled, rig.in_flight) == (1, 0, [1])
            first.set()
        assert (lane.open, lane.cancelled, rig.in_flight, rig.outcome.kind) == (0, 1, [0], "client-gone")


async def test_a_held_call_without_an_output_is_cancelled_when_its_time_is_up(autojump_clock):
    for stream in (False, True):
        lane = ScriptedLane([trio.Event()])
        rig = Rig(make_worker("a", lane), plugins=[held()])
        start = trio.current_time()
        async with trio.open_nursery() as nursery:
            await leave(rig, nursery, stream=stream)
        assert (trio.current_time() - start, lane.cancelled, rig.outcome.kind) == (10, 1, "client-gone")


async def test_a_held_call_waits_for_its_first_output_as_long_as_its_client_does(autojump_clock):
    first = trio.Event()
    rig = Rig(make_worker("a", ScriptedLane([first, output(7, finish="stop")])), plugins=[held()])
    async with trio.open_nursery() as nursery:
        browser = Browser(BODY)
        nursery.start_soon(browser.ask, rig)
        await trio.sleep(3600)
        first.set()
    assert browser.json["choices"][0]["token_ids"] == [7]


async def test_a_held_call_is_cancelled_at_once_after_its_first_output():
    for stream in (False, True):
        lane = ScriptedLane([output(7), trio.Event()])
        rig = Rig(make_worker("a", lane), plugins=[held()])
        async with trio.open_nursery() as nursery:
            await leave(rig, nursery, stream=stream)
            assert (lane.open, lane.cancelled, rig.outcome.kind) == (0, 1, "client-gone")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("leaves", [False, True])
async def test_a_shutdown_waits_for_no_held_call(stream, leaves):
    lane = ScriptedLane([trio.Event()])
    rig = Rig(make_worker("a", lane), plugins=[held()])
    browser = Browser({**BODY, "stream": stream})
    with trio.fail_after(1):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(browser.ask, rig)
            await wait_all_tasks_blocked()
            if leaves:
                browser.gone.set()
                await wait_all_tasks_blocked()
                assert lane.open == 1
            nursery.cancel_scope.cancel()
    assert (lane.open, lane.cancelled, rig.in_flight) == (0, 1, [0])


async def test_a_call_is_placed_though_its_client_goes_right_after_it_was_begun():
    begun, lane = trio.Event(), ScriptedLane([output(7), trio.Event()])
    rig = Rig(make_worker("a", lane), plugins=[held(before=begun)])
    browser = Browser(BODY)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(browser.ask, rig)
        await wait_all_tasks_blocked()
        begun.set()  # both happen before the call runs again
        browser.gone.set()
    assert (len(lane.requests), lane.open, rig.outcome.kind) == (1, 0, "client-gone")


async def test_a_call_whose_client_goes_while_it_is_begun_is_not_placed():
    lane = ScriptedLane([output(7)])
    rig = Rig(make_worker("a", lane), plugins=[held(before=trio.Event())])
    async with trio.open_nursery() as nursery:
        await leave(rig, nursery)
    assert (lane.requests, rig.outcome.kind) == ([], "client-gone")


async def test_the_messages_of_a_held_unary_call_are_put_together():
    def said(*token_ids: int, **fields: Any):
        content = [TokenLogprob(token_id, -1.0, 1) for token_id in token_ids]
        return output(*token_ids, logprobs=Logprobs(content), **fields)

    script = [said(5, prompt_token_ids=[1, 2, 3]), [said(6), output(7, prompt=None)], said(8, finish="stop", completion_tokens=4)]
    browser = await ask(Rig(make_worker("a", ScriptedLane(script)), plugins=[held()]))
    [choice] = browser.json["choices"]
    assert (choice["token_ids"], choice["finish_reason"]) == ([5, 6, 7, 8], "stop")
    assert [entry["token_id"] for entry in choice["logprobs"]["content"]] == [5, 6, 8]
    assert browser.json["prompt_token_ids"] == [1, 2, 3]
    assert (browser.json["usage"]["prompt_tokens"], browser.json["usage"]["completion_tokens"]) == (3, 4)


async def test_a_failure_is_tried_elsewhere_as_often_as_the_attempt_says_and_begun_anew_each_time():
    for stream in (False, True):
        lanes = [ScriptedLane([FAILED]) for _ in range(3)]
        begins = Begins(retries=1)
        rig = Rig(*(make_worker(str(i), lane) for i, lane in enumerate(lanes)), plugins=[begins])
        browser = await ask(rig, stream=stream)
        assert (browser.status, rig.outcome.error, rig.outcome.attempts, begins.count) == (500, FAILED.message, 2, 2)
        assert sum(len(lane.requests) for lane in lanes) == 2


async def test_a_failure_that_an_attempt_does_not_speak_of_is_not_tried_elsewhere():
    lanes = [ScriptedLane([FAILED]), ScriptedLane([output(7, finish="stop")])]
    assert (await ask(Rig(make_worker("0", lanes[0]), make_worker("1", lanes[1])))).status == 500
    assert not lanes[1].requests


async def test_a_failure_with_nobody_else_to_try_is_told_as_it_is():
    rig = Rig(make_worker("a", ScriptedLane([FAILED])), plugins=[Begins(retries=1)])
    assert (await ask(rig)).json["error"]["message"] == FAILED.message


async def test_a_refusal_is_not_tried_elsewhere():
    lanes = [ScriptedLane([CallError(400, "no")]), ScriptedLane([output(7, finish="stop")])]
    browser = await ask(Rig(make_worker("0", lanes[0]), make_worker("1", lanes[1]), plugins=[Begins(retries=1)]))
    assert (browser.status, lanes[1].requests) == (400, [])


async def test_nothing_is_begun_when_nobody_is_left_to_go_on():
    begins = Begins()
    browser = await ask(Rig(make_worker("a", ScriptedLane([WorkerLost("gone")])), plugins=[begins]))
    assert (browser.status, begins.count) == (503, 1)


async def test_an_attempt_begins_anew_after_the_fleet_was_paused_meanwhile():
    begun, worker = trio.Event(), make_worker("a", ScriptedLane([output(7, finish="stop")]))
    begins = Begins(begun)
    rig = Rig(worker, plugins=[begins])
    async with trio.open_nursery() as nursery:
        browser = Browser(BODY)
        nursery.start_soon(browser.ask, rig)
        await wait_all_tasks_blocked()
        rig.move(worker, "paused")
        begun.set()
        await wait_all_tasks_blocked()
        assert begins.count == 1
        rig.move(worker, "ready")
    assert (browser.status, begins.count) == (200, 2)


async def test_an_attempt_begins_anew_when_its_worker_was_paused():
    lane = ScriptedLane([WorkerPaused("Generation is paused")], [output(7, finish="stop")])
    worker, begins = make_worker("a", lane), held()
    rig = Rig(worker, plugins=[begins])
    async with trio.open_nursery() as nursery:
        browser = Browser(BODY)
        nursery.start_soon(browser.ask, rig)
        await wait_all_tasks_blocked()
        rig.move(worker, "ready")
    assert (browser.status, begins.count) == (200, 2)


async def test_a_leg_counts_as_a_leg_and_not_as_a_call():
    lane = ScriptedLane([output(7, finish="length")], [CallError(400, "no")])
    rig = Rig(make_worker("p", lane, role="prefill"))
    call = Call(id="r1", token_ids=[1, 2, 3], sampling=SamplingParams(), role="prefill")
    reply, outcome = await rig.path.leg(call)
    assert (reply.choices[0].token_ids, outcome.worker, outcome.kind, outcome.prompt_tokens) == ([7], "p", "ok", 3)
    with pytest.raises(CallError, match="no"):
        await rig.path.leg(call)
    metrics = rig.metrics.text().decode()
    assert 'headrace_legs_total{outcome="ok",role="prefill",worker="p"} 1.0' in metrics
    assert 'headrace_legs_total{outcome="refused",role="prefill",worker="p"} 1.0' in metrics
    assert "headrace_calls_total{" not in metrics
    assert (rig.witness.outcomes, rig.in_flight) == ([], [0])


async def test_a_leg_that_is_cancelled_is_cancelled_on_its_worker():
    lane = ScriptedLane([trio.Event()])
    rig = Rig(make_worker("p", lane, role="prefill"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.path.leg, Call(id="r1", token_ids=[1], sampling=SamplingParams(), role="prefill"))
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert (lane.cancelled, rig.in_flight) == (1, [0])
