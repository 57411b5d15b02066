"""Round robin: the workers of a model take turns."""

from collections import Counter

from core.hookspecs import Choice
from plugins.routing_round_robin import RoundRobin
from tests.unit.core.lanes import ScriptedLane, output
from tests.unit.core.rig import Browser, Rig, make_call, make_worker

A, B, C = (make_worker(name) for name in "abc")


def turns(policy, workers, count, **call):
    return [turn(policy, workers, make_call(**call)) for _ in range(count)]


def turn(policy, workers, call):
    choice = policy.choose_worker(call, workers)
    policy.attempt_started(call, choice)
    return choice.worker


def test_the_workers_take_turns():
    assert turns(RoundRobin(), (A, B, C), 7) == [A, B, C, A, B, C, A]


def test_each_model_has_turns_of_its_own():
    policy = RoundRobin()
    assert turns(policy, (A, B), 1, model="x") == [A]
    assert turns(policy, (A, B), 3, model="y") == [A, B, A]
    assert turns(policy, (A, B), 1, model="x") == [B]


def test_each_role_has_turns_of_its_own():
    policy = RoundRobin()
    chosen = [turns(policy, (A, B), 1, role=role) for _ in range(2) for role in ("prefill", "decode")]
    assert chosen == [[A], [A], [B], [B]]


def test_calls_that_decode_workers_do_whole_take_turns_with_those_that_were_prefilled():
    policy = RoundRobin()
    assert [turns(policy, (A, B), 1, role=role) for role in (None, "decode", None, "decode")] == [[A], [B], [A], [B]]


def test_a_worker_that_leaves_takes_no_turns_and_the_others_go_on():
    policy = RoundRobin()
    turns(policy, (A, B, C), 2)
    assert Counter(turns(policy, (A, C), 10)) == {A: 5, C: 5}


def test_to_be_asked_is_no_turn_and_neither_is_what_another_policy_chose():
    policy = RoundRobin()
    for _ in range(2):
        assert policy.choose_worker(make_call(), (A, B)).worker is A
    policy.attempt_started(make_call(), Choice(A, "session"))
    assert turns(policy, (A, B), 2) == [A, B]


def test_the_reason_is_its_name():
    assert RoundRobin().choose_worker(make_call(), (A,)).reason == "round-robin"


async def test_calls_of_a_fleet_are_spread_evenly():
    lanes = [ScriptedLane([output(7, finish="stop")]) for _ in range(3)]
    rig = Rig(*(make_worker(name, lane) for name, lane in zip("abc", lanes, strict=True)))
    for _ in range(9):
        await Browser().ask(rig)
    assert [len(lane.requests) for lane in lanes] == [3, 3, 3]
