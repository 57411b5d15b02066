"""`n` outputs of one call as requests side by side."""

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from core.call import SamplingParams
from core.errors import CallError, WorkerLost
from core.fanout import gather, merge
from tests.unit.core.lanes import RefusedAtEntry, Script, ScriptedLane, output
from tests.unit.core.rig import Browser, Rig, make_call, make_worker


def wants(n, **sampling):
    return make_call(sampling=SamplingParams(n=n, **sampling))


def lowered(call, lane):
    return [lane.lower(call, index) for index in range(call.sampling.n)]


async def test_the_answers_come_in_the_order_of_the_requests_whichever_is_first():
    late = trio.Event()
    lane = ScriptedLane([late, output(0, finish="stop")], [output(1, finish="stop")], [output(2, finish="stop")])
    call = wants(3)
    outputs = []

    async def run():
        outputs.extend(await gather(call, lane, lowered(call, lane)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        await wait_all_tasks_blocked()
        late.set()
    assert lane.most_open == 3
    assert [answer.choice.index for answer in outputs] == [0, 1, 2]


async def test_each_output_has_an_id_and_a_seed_of_its_own():
    lane = ScriptedLane([output(0, finish="stop")])
    call = wants(3, seed=41)
    await gather(call, lane, lowered(call, lane))
    assert sorted((r.request_id, r.sampling.seed) for r in lane.requests) == [("r1-0", 41), ("r1-1", 42), ("r1-2", 43)]


async def test_only_the_first_output_asks_about_the_prompt():
    lane = ScriptedLane([output(0, finish="stop")])
    call = make_call(sampling=SamplingParams(n=2, prompt_logprobs=1), return_token_ids=True)
    first, second = lowered(call, lane)
    assert (first.response.prompt_logprobs, first.response.prompt_token_ids) == (True, True)
    assert (second.response.prompt_logprobs, second.response.prompt_token_ids) == (False, False)


@pytest.mark.parametrize("error", [CallError(400, "no"), WorkerLost("gone")])
async def test_the_first_failure_cancels_the_others_and_comes_out_in_no_group(error):
    lane = ScriptedLane([trio.Event()], [error], [trio.Event()])
    call = wants(3)
    with pytest.raises(type(error)) as raised:
        await gather(call, lane, lowered(call, lane))
    assert raised.value is error
    assert (lane.open, lane.cancelled) == (0, 2)


async def test_two_failures_at_once_are_one_of_them():
    lane = ScriptedLane([CallError(400, "no")])
    call = wants(4)
    with pytest.raises(CallError, match="no"):
        await gather(call, lane, lowered(call, lane))
    assert lane.open == 0


async def test_cancelling_releases_every_request():
    lane = ScriptedLane([trio.Event()])
    call = wants(3)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(gather, call, lane, lowered(call, lane))
        await wait_all_tasks_blocked()
        assert lane.open == 3
        nursery.cancel_scope.cancel()
    assert (lane.open, lane.cancelled) == (0, 3)


class _FailsWhenCancelled(ScriptedLane):
    """A request that answers its own cancellation with an error, as one that was just about to fail does."""

    def __init__(self, *scripts: Script) -> None:
        super().__init__(*scripts)
        self.failing = trio.Event()

    async def generate(self, call, request, index):
        if index:
            return await super().generate(call, request, index)
        with trio.CancelScope(shield=True):
            await self.failing.wait()
        raise CallError(500, "failed in the same moment")


async def test_a_client_that_goes_in_the_moment_of_a_failure_is_no_error_of_the_server():
    lane = _FailsWhenCancelled([trio.Event()])
    rig = Rig(make_worker("a", lane))
    browser = Browser({"token_ids": [1], "sampling_params": {"n": 2}})
    async with trio.open_nursery() as nursery:
        nursery.start_soon(browser.ask, rig)
        await wait_all_tasks_blocked()
        browser.gone.set()
        lane.failing.set()
    assert rig.outcome.kind == "client-gone"
    assert rig.in_flight == [0]


async def test_merged_streams_end_when_the_last_has_ended():
    late = trio.Event()
    lane = ScriptedLane([output(0, finish="stop")], [late, output(1, finish="stop")])
    call = wants(2)
    async with merge(call, lane, lowered(call, lane)) as merged:
        first = await merged.receive()
        late.set()
        second = await merged.receive()
        assert await merged.receive() == []
        assert await merged.receive() == []
    assert sorted(o.choice.index for o in first + second) == [0, 1]
    assert (lane.open, lane.cancelled) == (0, 0)


async def test_leaving_merged_streams_early_cancels_them_on_the_worker():
    lane = ScriptedLane([output(0), trio.Event()])
    call = wants(3)
    async with merge(call, lane, lowered(call, lane)) as merged:
        await merged.receive()
    assert lane.open == 0
    assert lane.cancelled == 3


async def test_the_failure_of_one_stream_does_not_interrupt_what_the_reader_does_with_the_output_of_another():
    """A write that is cancelled half-way can't be followed by another."""
    failing = trio.Event()
    lane = ScriptedLane([output(0), trio.Event()], [failing, CallError(500, "failed")])
    call = wants(2)
    done = []

    async def read():
        async with merge(call, lane, lowered(call, lane)) as merged:
            done.append(await merged.receive())
            failing.set()
            await wait_all_tasks_blocked()
            await trio.lowlevel.checkpoint()
            done.append("written")
            await merged.receive()

    with pytest.raises(CallError, match="failed"):
        await read()
    assert done[-1] == "written"
    assert lane.open == 0


async def test_releasing_merged_streams_releases_each():
    lane = ScriptedLane([output(0), trio.Event()])
    call = wants(3)
    async with merge(call, lane, lowered(call, lane)) as merged:
        await wait_all_tasks_blocked()
        merged.release()
        assert lane.released == 3


@pytest.mark.parametrize("script", [[CallError(400, "no")], [RefusedAtEntry(CallError(400, "no"))]])
@pytest.mark.parametrize("n", [1, 2])
async def test_the_failure_of_a_merged_stream_comes_out_in_no_group(script, n):
    lane = ScriptedLane(script)
    call = wants(n)
    with pytest.raises(CallError, match="no"):
        async with merge(call, lane, lowered(call, lane)) as merged:
            await merged.receive()
    assert lane.open == 0


async def test_an_error_of_the_reader_comes_out_in_no_group_and_cancels_the_streams():
    lane = ScriptedLane([output(0), trio.Event()])
    call = wants(2)

    async def read():
        async with merge(call, lane, lowered(call, lane)) as merged:
            await merged.receive()
            raise CallError(500, "mine")

    with pytest.raises(CallError, match="mine"):
        await read()
    assert (lane.open, lane.cancelled) == (0, 2)
