"""Session: calls of one session go to one worker, and new sessions where the fewest are."""

from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from core.hookspecs import Choice
from core.registry import Loaded, Registry
from core.settings import PluginSettings
from plugins.routing_round_robin import RoundRobin
from plugins.routing_session import MAX_ID, SessionRouting, Settings
from plugins.routing_session.sessions import Home, Sessions
from tests.unit.core.lanes import ScriptedLane, output
from tests.unit.core.rig import Browser, Rig, make_call, make_worker

A, B, C = WORKERS = tuple(make_worker(name) for name in "abc")
BODY = {"token_ids": [1, 2, 3], "sampling_params": {}}


@pytest.fixture
def policy():
    return SessionRouting(Settings())


def choose(policy, session, workers=WORKERS, **fields):
    call = make_call(session_id=session, **fields)
    return policy.choose_worker(call, workers)


def ask(policy, session, workers=WORKERS, **fields):
    """A call of that session, from its choice to its end."""
    call = make_call(session_id=session, **fields)
    choice = policy.choose_worker(call, workers)
    policy.attempt_started(call, choice)
    policy.attempt_ended(call)
    return choice


async def test_calls_of_a_session_go_to_one_worker(policy):
    first = ask(policy, "s")
    assert first.reason == "session: new; fewest here, 0"
    for _ in range(5):
        choice = ask(policy, "s")
        assert (choice.worker, choice.reason) == (first.worker, "session: its worker")


async def test_a_new_session_goes_where_the_fewest_sessions_are_and_not_the_fewest_calls(policy):
    assert {ask(policy, f"s{number}").worker for number in range(3)} == set(WORKERS)
    for _ in range(9):
        ask(policy, "s0")
    policy.session_finished("s1")
    choice = choose(policy, "s3")
    assert choice.reason == "session: new; fewest here, 0"
    assert choice.worker not in {choose(policy, session).worker for session in ("s0", "s2")}


async def test_sessions_are_spread_evenly(policy):
    for number in range(300):
        ask(policy, f"s{number}")
    assert policy._sessions.live == {Home(name, None): 100 for name in "abc"}


async def test_to_be_asked_makes_no_session(policy):
    choose(policy, "s")
    assert len(policy._sessions) == 0


async def test_a_session_that_was_finished_is_new_again(policy):
    ask(policy, "s")
    policy.session_finished("s")
    policy.session_finished("s")
    assert choose(policy, "s").reason == "session: new; fewest here, 0"
    assert policy._sessions.live == {}


async def test_a_session_that_is_finished_while_its_call_runs_leaves_nothing(policy):
    call = make_call(session_id="s")
    policy.attempt_started(call, Choice(A, "x"))
    policy.session_finished("s")
    policy.attempt_ended(call)
    assert (len(policy._sessions), policy._sessions.live, policy._attempts) == (0, {}, {})


async def test_a_session_is_forgotten_when_it_was_idle_for_two_hours(policy, autojump_clock):
    ask(policy, "s")
    await trio.sleep(7199)
    assert choose(policy, "s").reason == "session: its worker"
    await trio.sleep(1)
    assert choose(policy, "s").reason.startswith("session: new")
    ask(policy, "other")
    assert len(policy._sessions) == 1


async def test_a_session_whose_call_runs_for_longer_is_not_idle(policy, autojump_clock):
    call = make_call(session_id="s")
    policy.attempt_started(call, Choice(A, "x"))
    await trio.sleep(10_000)
    ask(policy, "other")
    assert choose(policy, "s").worker is A
    policy.attempt_ended(call)
    await trio.sleep(7199)
    assert choose(policy, "s").worker is A


async def test_a_session_moves_when_its_worker_cannot_take_the_call_and_stays_there(policy):
    home = ask(policy, "s").worker
    others = tuple(worker for worker in WORKERS if worker is not home)
    moved = ask(policy, "s", others)
    assert moved.reason == f"session: {home.id} can't take it; fewest here, 0"
    assert choose(policy, "s").worker is moved.worker
    assert policy._sessions.live == {Home(moved.worker.id, None): 1}


async def test_the_home_is_where_the_last_call_went_whichever_policy_chose_it(policy):
    policy.attempt_started(make_call(session_id="s"), Choice(C, "another policy"))
    assert choose(policy, "s").worker is C


@pytest.mark.parametrize("session", ["", "x" * (MAX_ID + 1), "é" * (MAX_ID // 2 + 1)])
async def test_a_call_without_a_session_is_left_to_the_next_policy(policy, session):
    assert choose(policy, session) is None
    call = make_call(session_id=session)
    policy.attempt_started(call, Choice(A, "x"))
    policy.attempt_ended(call)
    assert len(policy._sessions) == 0


async def test_an_id_of_256_bytes_is_one(policy):
    assert choose(policy, "é" * (MAX_ID // 2))


async def test_of_too_many_sessions_the_one_that_was_idle_for_longest_is_forgotten():
    policy: Any = SessionRouting(Settings(max_sessions=2))
    for session in ("a", "b", "a", "c"):
        ask(policy, session)
    assert [choose(policy, session).reason[:12] for session in ("a", "b", "c")] == ["session: its", "session: new", "session: its"]


async def test_a_session_keeps_its_decode_worker_whether_its_calls_are_split_or_not(policy):
    home = ask(policy, "s").worker
    ask(policy, "s", (A,), role="prefill")
    for role in ("decode", None, "decode"):
        choice = ask(policy, "s", role=role)
        assert (choice.worker, choice.reason) == (home, "session: its worker")
    assert sum(policy._sessions.live.values()) == 2, "one home for prefill, one for the rest"


async def test_a_session_has_a_home_for_each_model_and_part_of_a_call(policy):
    ask(policy, "s", (A,), model="x")
    ask(policy, "s", (B,), model="y")
    ask(policy, "s", (C,), model="x", role="prefill")
    homes = [choose(policy, "s", model=model, role=role).worker for model, role in (("x", None), ("y", None), ("x", "prefill"))]
    assert homes == [A, B, C]
    policy.session_finished("s")
    assert policy._sessions.live == {}


async def test_a_session_stays_on_one_rank(policy):
    worker = make_worker("dp")
    assert worker.info
    worker.info = replace(worker.info, ranks=(0, 1, 2, 3))
    ranks = [ask(policy, f"s{number}", (worker,)).rank for number in range(4)]
    assert sorted(ranks) == [0, 1, 2, 3]
    assert [choose(policy, f"s{number}", (worker,)).rank for number in range(4)] == ranks
    assert choose(policy, "s0", (worker,), data_parallel_rank=(ranks[0] + 1) % 4).rank == (ranks[0] + 1) % 4


async def test_sessions_of_a_fleet_stay_and_survive_the_loss_of_their_worker(policy):
    workers = tuple(make_worker(name, ScriptedLane([output(7, finish="stop")])) for name in "ab")
    rig = Rig(*workers, plugins=[policy], policies=["p0", "round-robin"])
    headers = {"x-session-id": "s"}
    homes = {(await Browser(BODY, headers).ask(rig)).headers["x-headrace-worker"] for _ in range(4)}
    [home] = homes
    rig.move(next(worker for worker in workers if worker.id == home), "gone")
    browser = await Browser(BODY, headers).ask(rig)
    assert browser.status == 200
    assert browser.headers["x-headrace-worker"] != home
    assert browser.headers["x-headrace-route"] == f"session: {home} can't take it; fewest here, 0"
    assert (await Browser(BODY).ask(rig)).headers["x-headrace-route"] == "round-robin"


@pytest.mark.parametrize("settings", [{"idle": 0}, {"max_sessions": 0}])
def test_settings_that_are_none_are_refused(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        Settings(**settings)


def test_it_is_loaded_by_its_name():
    assert issubclass(SessionRouting.settings_type, PluginSettings)
    registry = Registry([Loaded("session", SessionRouting(Settings())), Loaded("round-robin", RoundRobin())], ["session", "round-robin"])
    assert registry.policies == {"session", "round-robin"}


steps = st.lists(
    st.one_of(
        st.tuples(st.just("start"), st.sampled_from("abcdef"), st.sampled_from("xyz")),
        st.tuples(st.just("end"), st.integers(0, 9), st.none()),
        st.tuples(st.just("finish"), st.sampled_from("abcdef"), st.none()),
        st.tuples(st.just("wait"), st.integers(1, 90), st.none()),
    ),
    max_size=80,
)


@given(steps)
def test_the_counts_are_those_of_the_sessions_that_live_and_both_are_bounded(steps):
    sessions, now, running = Sessions(idle=60, most=4), 0.0, []
    for step, what, worker in steps:
        match step:
            case "start":
                running.append(sessions.start(what, ("m", None), Home(worker, None), now))
            case "end" if running:
                sessions.end(running.pop(what % len(running)), now)
            case "finish":
                sessions.forget(what)
            case "wait":
                now += what
        counted: dict[Home, int] = {}
        for session in sessions._sessions.values():
            for home in session.homes.values():
                counted[home] = counted.get(home, 0) + 1
        assert sessions.live == counted
        assert len(sessions) <= 4
        assert all(session.in_flight >= 0 for session in sessions._sessions.values())
    for session in running:
        sessions.end(session, now)
    sessions.start("last", ("m", None), Home("x", None), now + 61)
    assert len(sessions) == 1
