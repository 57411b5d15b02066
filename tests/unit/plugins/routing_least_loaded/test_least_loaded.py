"""Least loaded: tokens in flight are counted exactly, whatever becomes of the calls."""

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from trio.testing import wait_all_tasks_blocked

from core.call import SamplingParams
from core.errors import WorkerLost
from core.hookspecs import Choice
from core.registry import Loaded, Registry
from core.settings import SettingsError, convert_settings
from plugins.routing_least_loaded import COMPARED, LeastLoaded, Settings
from tests.unit.core.lanes import ScriptedLane, output
from tests.unit.core.rig import Browser, Rig, make_call, make_worker

A, B = make_worker("a"), make_worker("b")


def policy(output_tokens=10):
    return LeastLoaded(Settings(output_tokens=output_tokens))


def call(prompt=3, **fields):
    sampling = SamplingParams(max_tokens=fields.pop("max_tokens", None), n=fields.pop("n", None))
    return make_call(token_ids=[1] * prompt, sampling=sampling, **fields)


def on(policy, worker, call, rank=None):
    """Start an attempt there, and return what is needed to end it."""
    choice = Choice(worker, "in a test", rank)
    policy.attempt_started(call, choice)
    return call


def with_ranks(name, *ranks):
    worker = make_worker(name)
    assert worker.info
    worker.info = replace(worker.info, ranks=ranks)
    return worker


def test_the_worker_with_the_fewest_tokens_is_taken_and_not_the_one_with_the_fewest_calls():
    least = policy()
    on(least, A, call(prompt=30_000))
    for _ in range(10):
        on(least, B, call(prompt=100))
    choice = least.choose_worker(call(), (A, B))
    assert (choice.worker, choice.reason) == (B, "least-loaded: 1,100 tokens in flight")


def test_to_be_asked_counts_nothing():
    least = policy()
    for _ in range(5):
        assert least.choose_worker(call(), (A,)).reason == "least-loaded: 0 tokens in flight"


def test_idle_workers_are_taken_by_lot():
    least = policy()
    assert {least.choose_worker(call(), (A, B)).worker for _ in range(64)} == {A, B}


def test_an_attempt_that_has_ended_leaves_nothing():
    least = policy()
    started = [on(least, A, call(prompt=n)) for n in range(1, 5)]
    for each in started:
        least.attempt_ended(each, 7)
    assert least.load(A, None) == 0
    assert (least._load, least._counted) == ({}, {})


@pytest.mark.parametrize(("fields", "tokens"), [({}, 13), ({"max_tokens": 4}, 7), ({"max_tokens": 99}, 13), ({"n": 3}, 33)])
def test_what_counts_is_the_prompt_and_the_expected_output(fields, tokens):
    least = policy()
    on(least, A, call(**fields))
    assert least.load(A, None) == tokens


def test_the_expected_output_is_the_mean_of_what_calls_have_had():
    least = policy(output_tokens=1000)
    for tokens in (10, 20, 0):  # none tells nothing
        least.attempt_ended(on(least, A, call()), tokens)
    on(least, A, call())
    assert least.load(A, None) == 3 + 15


def test_a_relayed_calls_prompt_is_guessed_from_the_length_of_its_body():
    least = policy()
    on(least, A, make_call(token_ids=[], relayed=True, headers={"content-length": "400"}))
    assert least.load(A, None) == 110
    on(least, B, make_call(token_ids=[], relayed=True, headers={"content-length": "many"}))
    assert least.load(B, None) == 10


def test_of_many_workers_two_are_compared():
    least = policy()
    workers = tuple(make_worker(f"w{number}") for number in range(COMPARED + 1))
    busy = [on(least, worker, call()) for worker in workers[1:]]
    taken = [least.choose_worker(call(), workers).worker for _ in range(200)]
    assert 0 < taken.count(workers[0]) < 60  # it is one of the two in 2 of 33 cases
    assert len(busy) == COMPARED


def test_each_rank_has_a_load_of_its_own():
    least, worker = policy(), with_ranks("a", 4, 5)
    on(least, worker, call(), rank=4)
    choice = least.choose_worker(call(), (worker,))
    assert (choice.rank, choice.reason) == (5, "least-loaded: 0 tokens in flight on rank 5")


def test_a_rank_is_compared_with_a_worker_that_has_only_one():
    least, worker = policy(), with_ranks("a", 0, 1)
    on(least, worker, call(), rank=0)
    on(least, worker, call(), rank=1)
    assert least.choose_worker(call(), (worker, B)).worker is B


def test_calls_that_were_left_to_a_worker_are_taken_for_spread_over_its_ranks():
    least, worker = policy(), with_ranks("a", 0, 1)
    on(least, worker, call(prompt=10))
    assert [least.load(worker, rank) for rank in (0, 1)] == [10, 10]


def test_the_rank_that_a_client_asks_for_is_the_one_that_is_compared():
    least = policy()
    workers = with_ranks("a", 0, 1), with_ranks("b", 0, 1)
    on(least, workers[0], call(), rank=1)
    choice = least.choose_worker(call(data_parallel_rank=1), workers)
    assert (choice.worker, choice.rank) == (workers[1], 1)


steps = st.lists(
    st.tuples(st.sampled_from(["start", "end"]), st.integers(0, 7), st.integers(1, 500), st.sampled_from([None, 0, 1])), max_size=60
)


@given(steps)
def test_loads_are_the_sum_of_what_is_in_flight_never_negative_and_nothing_in_the_end(steps):
    least, workers = policy(), (with_ranks("a", 0, 1), make_worker("b"))
    running = []
    for step, number, tokens, rank in steps:
        if step == "start":
            worker = workers[number % 2]
            running.append(on(least, worker, call(prompt=tokens), rank=rank if worker is workers[0] else None))
        elif running:
            least.attempt_ended(running.pop(number % len(running)), tokens)
        assert all(load > 0 for load in least._load.values())
        assert sum(least._load.values()) == sum(counted for _, counted in least._counted.values())
        assert len(least._counted) == len(running)
    for each in running:
        least.attempt_ended(each, 0)
    assert (least._load, least._counted) == ({}, {})


@given(
    scripts=st.lists(st.sampled_from(["answers", "is lost", "hangs", "answers late"]), min_size=1, max_size=12),
    streams=st.lists(st.booleans(), min_size=12, max_size=12),
    changes=st.integers(0, 2),
)
def test_nothing_is_left_in_flight_after_retries_and_cancellations(scripts, streams, changes):
    trio.run(_live_through, scripts, streams, changes)


async def _live_through(scripts, streams, changes):
    late = trio.Event()
    kinds = {
        "answers": [output(7), output(8, finish="stop")],
        "is lost": [WorkerLost("gone")],
        "hangs": [output(7), trio.Event()],
        "answers late": [late, output(7), output(8, finish="stop")],
    }
    least = policy()
    workers = tuple(make_worker(name, ScriptedLane(*(kinds[script] for script in scripts))) for name in "abc")
    rig = Rig(*workers, plugins=[least], policies=["p0"])
    browsers = [Browser({"token_ids": [1, 2, 3], "sampling_params": {}, "stream": stream}) for stream in streams]
    async with trio.open_nursery() as nursery:
        for browser in browsers:
            nursery.start_soon(browser.ask, rig)
        await wait_all_tasks_blocked()
        in_flight = sum(rig.in_flight)
        assert len(least._counted) == in_flight
        for _ in range(changes):  # counted anew when it comes into force again
            rig.routing.change(replace(rig.routing.settings, policies=["round-robin"]))
            assert not least._counted
            rig.routing.change(replace(rig.routing.settings, policies=["p0"]))
            assert len(least._counted) == in_flight
        late.set()
        await wait_all_tasks_blocked()
        for browser in browsers:
            browser.gone.set()
    assert (least._load, least._counted) == ({}, {})


def test_it_is_loaded_by_its_name():
    assert Registry([Loaded("least-loaded", policy())], ["least-loaded"]).policies == {"least-loaded"}


def test_an_output_of_fewer_than_no_tokens_is_refused():
    with pytest.raises(SettingsError, match=r"plugins.least-loaded.output_tokens: Expected `int` >= 0"):
        convert_settings({"output_tokens": -5}, Settings, source="headrace.toml", path="plugins.least-loaded")
