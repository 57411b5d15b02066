"""Workers that fail, clients that go: who is tried again, what is cancelled, and what is held."""

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from core.errors import CallError, WorkerLost
from core.explaining import Explainer
from tests.unit.core.lanes import output
from tests.unit.core.rig import Browser, make_call, make_worker
from tests.unit.plugins.disaggregation.fleet import Fleet, decode, lane, prefill, prefilled

FAILED = CallError(500, "engine failed during generation")
LOST = WorkerLost("connection refused")
BODY = {"token_ids": [1, 2, 3], "sampling_params": {}}


@pytest.mark.parametrize("error", [FAILED, LOST])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_prefill_that_fails_is_tried_once_elsewhere(error, stream):
    bad, good = prefill(error, name="p0"), prefill(name="p1")
    browser = await Fleet(bad, good, decode()).ask(stream=stream)
    assert (browser.status, len(lane(bad).requests), len(lane(good).requests)) == (200, 1, 1)


@pytest.mark.parametrize("error", [FAILED, LOST])
async def test_a_second_failure_of_the_prefill_is_reported_as_such(error):
    bad = [prefill(error, name=f"p{i}") for i in range(3)]
    d = decode()
    browser = await Fleet(*bad, d).ask()
    assert (browser.status, browser.json["error"]["message"]) == (error.status, f"prefill: {error.message}")
    assert sum(len(lane(worker).requests) for worker in bad) == 2
    assert not lane(d).requests


@pytest.mark.parametrize("error", [FAILED, LOST])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_decode_that_fails_is_tried_once_elsewhere_with_a_hand_off_of_its_own(error, stream):
    p, bad, good = prefill(), decode(error, name="d0"), decode(name="d1")
    browser = await Fleet(p, bad, good).ask(stream=stream)
    assert (browser.status, browser.headers["x-headrace-worker"]) == (200, "d1")
    assert (len(lane(p).requests), len(lane(bad).requests), len(lane(good).requests)) == (2, 1, 1)


@pytest.mark.parametrize("error", [FAILED, LOST])
async def test_a_second_failure_of_the_decode_is_reported(error):
    p, bad = prefill(), [decode(error, name=f"d{i}") for i in range(3)]
    fleet = Fleet(p, *bad)
    browser = await fleet.ask()
    assert (browser.status, browser.json["error"]["message"]) == (error.status, error.message)
    assert (len(lane(p).requests), sum(len(lane(worker).requests) for worker in bad)) == (2, 2)
    assert fleet.in_flight == [0, 0, 0, 0]


async def test_a_refusal_of_the_prefill_is_the_answer_word_for_word():
    d = decode()
    browser = await Fleet(prefill(CallError(400, "This model's maximum context length is 100 tokens", param="input_tokens")), d).ask()
    assert (browser.status, browser.json["error"]["message"]) == (400, "This model's maximum context length is 100 tokens")
    assert not lane(d).requests


async def test_a_prefill_without_a_hand_off_is_an_error_that_names_the_worker():
    browser = await Fleet(prefill(prefilled(handoff=None)), decode()).ask()
    why = "prefill: p returned no kv_transfer_params: start vLLM with --kv-transfer-config"
    assert (browser.status, browser.json["error"]["message"]) == (502, why)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_whose_prefill_is_aborted_is_aborted(stream):
    d = decode()
    fleet = Fleet(prefill(output(finish="abort")), d)
    browser = await fleet.ask(stream=stream)
    choices = [event["choices"][0] for event in browser.events[:-1]] if stream else browser.json["choices"]
    assert [(choice["token_ids"], choice["finish_reason"]) for choice in choices] == [([], "abort")]
    assert (fleet.outcome.kind, fleet.in_flight, lane(d).requests) == ("ok", [0, 0], [])


async def test_nothing_is_computed_when_no_decode_worker_is_ready():
    p, d = prefill(), decode()
    fleet = Fleet(p, d)
    fleet.move(d, "gone")
    browser = await fleet.ask()
    assert (browser.status, "d is gone (in a test)" in browser.json["error"]["message"]) == (503, True)
    assert not lane(p).requests


async def test_without_a_prefill_worker_that_is_ready_the_call_is_refused_and_says_so():
    p, d = prefill(), decode()
    fleet = Fleet(p, d)
    fleet.move(p, "gone")
    browser = await fleet.ask()
    assert (browser.status, "prefill: no worker is ready: p is gone" in browser.json["error"]["message"]) == (503, True)


@pytest.mark.parametrize(("lost", "state", "missing"), [("p", "gone", "prefill"), ("p", "draining", "prefill"), ("d", "gone", "decode")])
def test_a_model_that_lacks_the_workers_of_one_role_is_not_ready_and_says_so(lost, state, missing):
    workers = {"p": prefill(), "d": decode(), "whole": make_worker("a")}
    fleet = Fleet(*workers.values())

    def told() -> list[str]:
        serving = [worker for worker in workers.values() if worker.state in ("ready", "paused")]
        return fleet.registry.call("explain_unready", model="tiny", workers=serving)

    assert told() == []
    fleet.move(workers[lost], "paused")
    assert told() == []
    fleet.move(workers[lost], state)
    assert told() == [f"no {missing} worker is ready: {lost} is {state} (in a test)"]


def test_a_model_without_prefill_workers_lacks_none():
    d = decode()
    assert Fleet(d, prefill(name="q")).registry.call("explain_unready", model="other", workers=[d]) == []
    assert Fleet(d).registry.call("explain_unready", model="tiny", workers=[d]) == []


async def test_a_prefill_whose_client_goes_is_cancelled_and_nothing_follows():
    for stream in (False, True):
        p, d = prefill(trio.Event()), decode()
        fleet = Fleet(p, d)
        browser = Browser({**BODY, "stream": stream})
        async with trio.open_nursery() as nursery:
            nursery.start_soon(browser.ask, fleet)
            await wait_all_tasks_blocked()
            assert fleet.in_flight == [1, 0]
            browser.gone.set()
        assert (lane(p).cancelled, lane(d).requests, fleet.outcome.kind, fleet.in_flight) == (1, [], "client-gone", [0, 0])


async def test_a_decode_whose_client_goes_before_its_first_output_gets_that_far():
    for stream in (False, True):
        first = trio.Event()
        p, d = prefill(), decode(first, output(8), trio.Event())
        fleet = Fleet(p, d)
        browser = Browser({**BODY, "stream": stream})
        async with trio.open_nursery() as nursery:
            nursery.start_soon(browser.ask, fleet)
            await wait_all_tasks_blocked()
            browser.gone.set()
            await wait_all_tasks_blocked()
            assert (fleet.in_flight, lane(d).cancelled) == ([0, 1], 0)
            first.set()
        assert (lane(d).open, fleet.in_flight, fleet.outcome.kind) == (0, [0, 0], "client-gone")


async def test_a_decode_that_has_no_first_output_in_time_is_given_up(autojump_clock):
    p, d = prefill(), decode(trio.Event())
    fleet = Fleet(p, d)
    browser = Browser(BODY)
    start = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(browser.ask, fleet)
        await wait_all_tasks_blocked()
        browser.gone.set()
    assert (trio.current_time() - start, lane(d).cancelled, fleet.in_flight) == (30, 1, [0, 0])


async def test_a_decode_whose_client_goes_after_its_first_output_is_cancelled_at_once():
    for stream in (False, True):
        p, d = prefill(), decode(output(8), trio.Event())
        fleet = Fleet(p, d)
        browser = Browser({**BODY, "stream": stream})
        async with trio.open_nursery() as nursery:
            nursery.start_soon(browser.ask, fleet)
            await wait_all_tasks_blocked()
            browser.gone.set()
        assert (lane(d).open, fleet.in_flight, fleet.outcome.kind) == (0, [0, 0], "client-gone")


async def test_blocks_go_to_no_worker_with_other_weights():
    p, other, same = prefill(), decode(name="d0"), decode(name="d1")
    p.policy_version, other.policy_version, same.policy_version = "7", "6", "7"
    for _ in range(2):
        assert (await Fleet(p, other, same).ask()).headers["x-headrace-worker"] == "d1"


@pytest.mark.parametrize("versions", [("6", "7"), ("6", None), (None, "7")])
async def test_a_prompt_is_computed_with_weights_that_a_decode_worker_has(versions):
    old, new, d = prefill(name="p0"), prefill(name="p1"), decode()
    old.policy_version, new.policy_version, d.policy_version = *versions, "7"
    fleet = Fleet(old, new, d)
    assert [(await fleet.ask()).status for _ in range(4)] == [200] * 4
    assert bool(lane(old).requests) == (versions[0] is None)
    assert lane(new).requests


async def test_without_a_pair_of_the_same_weights_nothing_is_computed():
    p, d = prefill(), decode()
    p.policy_version, d.policy_version = "7", "6"
    fleet = Fleet(p, d)
    browser = await fleet.ask()
    why = "prefill: no prefill worker that is ready has the weights of a decode worker: '6'"
    assert (browser.status, browser.json["error"]["message"], lane(p).requests) == (503, why, [])
    explanation = await Explainer(fleet.registry, fleet.fleet, fleet.placer, fleet.path).explain(make_call())
    assert explanation.legs == ["prefill: nowhere now: no prefill worker that is ready has the weights of a decode worker: '6'"]
    p.policy_version = None
    assert (await fleet.ask()).status == 200


async def test_who_asks_where_a_call_would_go_is_told_of_a_pair_of_the_same_weights():
    workers = {name: make(name=name) for name, make in {"p0": prefill, "p1": prefill, "d0": decode, "d1": decode}.items()}
    for name, version in {"p0": "5", "p1": "6", "d0": "7", "d1": "6"}.items():
        workers[name].policy_version = version
    fleet = Fleet(*workers.values())
    explainer = Explainer(fleet.registry, fleet.fleet, fleet.placer, fleet.path)
    for _ in range(2):
        explanation = await explainer.explain(make_call())
        assert explanation.choice
        assert (explanation.choice.worker, explanation.legs) == ("d1", ["prefill=p1 (round-robin)"])
        assert (await fleet.ask()).headers["x-headrace-route"] == "prefill=p1 (round-robin), decode=d1 (round-robin)"


async def test_a_paused_decode_pool_holds_calls_back_before_anything_is_computed():
    p, d = prefill(), decode()
    fleet = Fleet(p, d)
    fleet.move(d, "paused")
    browser = Browser(BODY)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(browser.ask, fleet)
        await wait_all_tasks_blocked()
        assert not lane(p).requests
        fleet.move(d, "ready")
    assert (browser.status, len(lane(p).requests)) == (200, 1)
