"""Hand-offs that come to nothing: what frees their blocks, and when nothing has to."""

from typing import Any

import pytest
import trio
from google.protobuf.json_format import MessageToDict
from trio.testing import wait_all_tasks_blocked

from core.errors import CallError, WorkerLost, WorkerPaused
from tests.unit.core.lanes import ScriptedLane, output
from tests.unit.core.rig import Browser, make_worker
from tests.unit.plugins.disaggregation.fleet import HANDOFF, Fleet, decode, lane, prefill, prefilled

REFUSED = CallError(400, "that will not do")
BODY = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 9, "stop": ["x"], "logprobs": 2}, "cache_salt": "v7", "request_id": "r1"}


def releases(worker: Any) -> list[Any]:
    """What was sent to the worker only for blocks to be freed."""
    return [request for request in lane(worker).requests if request.request_id == "r1-release"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_its_decode_worker_refuses_has_its_blocks_freed(stream):
    p, d = prefill(), decode(REFUSED)
    fleet = Fleet(p, d)
    async with fleet.releasing():
        browser = await fleet.ask(**BODY, stream=stream)
    assert (browser.status, browser.json["error"]["message"]) == (400, REFUSED.message)
    [release] = releases(d)
    assert MessageToDict(release.kv.kv_transfer_params) == HANDOFF
    assert (list(release.token_ids.ids), release.stopping.max_new_tokens) == ([1, 2, 3], 1)
    assert fleet.in_flight == [0, 0]


async def test_nothing_of_the_call_that_can_be_refused_is_in_its_release_and_its_cache_is_its_own():
    d = decode(REFUSED)
    fleet = Fleet(prefill(), d)
    async with fleet.releasing():
        await Browser(BODY, {"x-session-id": "s"}).ask(fleet)
        await fleet.ask(**BODY)
    first, second = releases(d)
    assert (list(first.stopping.stop_strings), first.response.output_logprobs, first.session_id) == ([], False, "")
    assert len({"v7", first.kv.cache_salt, second.kv.cache_salt}) == 3


@pytest.mark.parametrize("error", [CallError(500, "engine failed during generation"), WorkerLost("connection refused")])
async def test_a_decode_that_is_tried_again_has_the_first_blocks_freed(error):
    p, bad, good = prefill(), decode(error, name="d0"), decode(name="d1")
    fleet = Fleet(p, bad, good)
    async with fleet.releasing():
        assert (await fleet.ask(**BODY)).status == 200
    assert len(releases(bad) + releases(good)) == 1


async def test_a_pause_between_the_parts_frees_the_blocks_and_the_prompt_is_computed_again():
    computed = trio.Event()
    p, d = prefill(computed, prefilled()), decode()
    fleet = Fleet(p, d)
    browser = Browser(BODY)
    async with fleet.releasing(), trio.open_nursery() as nursery:
        nursery.start_soon(browser.ask, fleet)
        await wait_all_tasks_blocked()
        fleet.move(d, "paused")
        computed.set()
        await wait_all_tasks_blocked()
        assert (len(lane(p).requests), lane(d).requests) == (1, [])
        fleet.move(d, "ready")
    assert (browser.status, len(lane(p).requests)) == (200, 2)
    assert (len(releases(d)), len(lane(d).requests)) == (1, 2)


async def test_a_decode_that_a_paused_engine_refuses_has_its_blocks_freed_after_the_pause():
    paused, whole = [WorkerPaused("Generation is paused")], [output(8, finish="stop")]
    d = make_worker("d", ScriptedLane(paused, whole), role="decode")
    fleet = Fleet(prefill(), d)
    browser = Browser(BODY)
    async with fleet.releasing(), trio.open_nursery() as nursery:
        nursery.start_soon(browser.ask, fleet)
        await wait_all_tasks_blocked()
        assert (d.state, len(lane(d).requests)) == ("paused", 1)
        fleet.move(d, "ready")
    assert (browser.status, len(releases(d)), len(lane(d).requests)) == (200, 1, 3)


async def test_blocks_whose_lease_is_over_are_not_freed(autojump_clock):
    computed = trio.Event()
    p, d = prefill(computed, prefilled()), decode()
    fleet = Fleet(p, d)
    browser = Browser(BODY)
    async with fleet.releasing(), trio.open_nursery() as nursery:
        nursery.start_soon(browser.ask, fleet)
        await wait_all_tasks_blocked()
        fleet.move(d, "paused")
        computed.set()
        await trio.sleep(31)
        fleet.move(d, "ready")
    assert (browser.status, releases(d)) == (200, [])


async def test_weights_that_change_between_the_parts_let_the_call_begin_anew_and_free_the_blocks():
    computed = trio.Event()
    old, new, d = prefill(computed, prefilled(), name="p0"), prefill(name="p1"), decode()
    old.policy_version = new.policy_version = d.policy_version = "7"
    fleet = Fleet(old, new, d)
    browser = Browser(BODY)
    async with fleet.releasing(), trio.open_nursery() as nursery:
        nursery.start_soon(browser.ask, fleet)
        await wait_all_tasks_blocked()
        new.policy_version = d.policy_version = "8"
        computed.set()
    assert (browser.status, browser.headers["x-headrace-route"]) == (200, "prefill=p1 (round-robin), decode=d (round-robin)")
    assert len(releases(d)) == 1


async def test_blocks_that_the_decode_worker_has_gone_on_with_are_not_freed_again():
    d = decode(output(8), CallError(500, "engine failed during generation"))
    fleet = Fleet(prefill(), d)
    async with fleet.releasing():
        assert (await fleet.ask(**BODY, stream=True)).status == 200
        assert fleet.outcome.kind == "failed"
    assert releases(d) == []


async def test_blocks_of_a_worker_that_is_gone_are_gone():
    refused = trio.Event()
    p, d = prefill(), decode(refused, REFUSED)
    fleet = Fleet(p, d)
    browser = Browser(BODY)
    async with fleet.releasing(), trio.open_nursery() as nursery:
        nursery.start_soon(browser.ask, fleet)
        await wait_all_tasks_blocked()
        fleet.move(p, "gone")
        refused.set()
    assert (browser.status, releases(d)) == (400, [])


async def test_a_release_that_fails_is_left_to_the_lease():
    d = decode(REFUSED)
    fleet = Fleet(prefill(), d)
    async with fleet.releasing():
        for _ in range(2):
            assert (await fleet.ask(**BODY)).status == 400
    assert len(releases(d)) == 2
