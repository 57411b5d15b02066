"""Consistent hash: the same key goes to the same worker, and as few keys as can be move when the fleet changes."""

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from core.errors import BadRequest
from core.northbound.body import parse_call
from core.northbound.relay import parse_relayed
from core.settings import RoutingSettings
from plugins.routing_consistent_hash import ConsistentHash
from plugins.routing_consistent_hash.keys import key_of
from tests.unit.core.lanes import ScriptedLane, output
from tests.unit.core.rig import Browser, Rig, make_call, make_worker

WORKERS = tuple(make_worker(f"w{number}") for number in range(16))
POLICY = ConsistentHash()
BODY = {"token_ids": [1, 2, 3], "sampling_params": {}}


def home(key, workers=WORKERS):
    return POLICY.choose_worker(make_call(headers={"x-session-id": key}), workers).worker


def parsed(body=None, headers=None):
    return parse_call(msgspec.json.encode({**BODY, **(body or {})}), headers or {})


@given(st.text(min_size=1), st.permutations(WORKERS))
def test_a_key_goes_to_one_worker_in_whatever_order_they_stand(key, workers):
    assert home(key) is home(key, tuple(workers))


@given(st.lists(st.text(min_size=1), unique=True, max_size=50), st.integers(0, 15))
def test_when_a_worker_leaves_only_its_own_keys_move_and_when_it_comes_back_they_do(keys, index):
    left = tuple(worker for worker in WORKERS if worker is not WORKERS[index])
    for key in keys:
        before, after = home(key), home(key, left)
        assert after is before or before is WORKERS[index]


def test_keys_are_spread_evenly_also_those_of_a_worker_that_has_left():
    keys = [f"rollout-{number}" for number in range(8000)]
    counts = Counter(home(key).id for key in keys)
    assert all(400 < counts[worker.id] < 600 for worker in WORKERS)  # four and a half standard deviations
    moved = Counter(home(key, WORKERS[1:]).id for key in keys if home(key) is WORKERS[0])
    assert len(moved) == 15


def test_keys_that_differ_in_one_token_are_spread_too():
    counts = Counter(POLICY.choose_worker(make_call(token_ids=[1, 2, number]), WORKERS).worker.id for number in range(8000))
    assert all(400 < counts[worker.id] < 600 for worker in WORKERS)


def test_the_choice_is_the_same_in_every_process_and_version():
    assert [home(key).id for key in ("a", "b", "c", "d")] == ["w14", "w1", "w12", "w3"]


def test_a_worker_that_comes_back_with_other_ranks_is_not_taken_for_what_it_was():
    worker, call = make_worker("dp"), make_call()
    assert worker.info
    assert POLICY.choose_worker(call, (worker,)).rank is None
    worker.info = replace(worker.info, ranks=(2, 3))
    assert POLICY.choose_worker(call, (worker,)).rank in (2, 3)


HEADERS = ("x-session-id", "x-user-id", "x-tenant-id", "x-request-id", "x-correlation-id", "x-trace-id")
FIELDS = {"session_params": {"session_id": "1"}, "user": "2", "session_id": "3", "user_id": "4"}


@pytest.mark.parametrize("first", range(len(HEADERS)))
def test_headers_count_in_their_order_and_before_the_body(first):
    call = parsed(FIELDS, {name: name for name in HEADERS[first:]})
    assert key_of(call)[0] == HEADERS[first]
    assert key_of(call)[1] == key_of(make_call(headers={"x-user-id": HEADERS[first]}))[1]


@pytest.mark.parametrize(
    ("first", "name"), [(0, "session_params.session_id"), (1, "user"), (2, "session_id"), (3, "user_id"), (4, "the prompt")]
)
def test_fields_of_the_body_count_in_their_order_and_before_the_prompt(first, name):
    assert key_of(parsed(dict(list(FIELDS.items())[first:])))[0] == name


@pytest.mark.parametrize("empty", [{"user": ""}, {"user": None}, {"session_params": None}, {"session_params": {}}])
def test_what_is_empty_is_no_key(empty):
    assert key_of(parsed(empty))[0] == "the prompt"
    assert key_of(make_call(headers={"x-session-id": ""}))[0] == "the prompt"


def test_equal_prompts_have_equal_keys_and_others_have_others():
    assert key_of(make_call(token_ids=[1, 2])) == key_of(make_call(token_ids=[1, 2]))
    assert key_of(make_call(token_ids=[1, 2])) != key_of(make_call(token_ids=[2, 1]))


@pytest.mark.parametrize("length", [4096, 4097, 30_000])
def test_a_long_prompt_differs_by_its_end_by_a_stretch_of_it_and_by_its_length(length):
    prompt = [7] * length
    key = key_of(make_call(token_ids=prompt))
    assert key == key_of(make_call(token_ids=[7] * length))
    others = [[*prompt[:-1], 8], [*prompt, 7], prompt[:-1], prompt[:50] + [8] * 50 + prompt[100:]]
    assert key not in [key_of(make_call(token_ids=other)) for other in others]


@pytest.mark.parametrize(("body", "param"), [({"user": 7}, "user"), ({"session_params": {"session_id": [1]}}, "session_params.session_id")])
def test_a_field_of_another_type_is_refused_by_its_name(body, param):
    with pytest.raises(BadRequest) as raised:
        parsed(body)
    assert raised.value.param == param


def relayed(body):
    call, _ = parse_relayed(msgspec.json.encode(body), {})
    return call


def test_a_relayed_body_is_read_and_left_as_it_is():
    call = relayed({"messages": [], "user": "u"})
    assert key_of(call)[0] == "user"
    assert "user" in call.unclaimed


def test_what_a_relayed_body_has_wrong_is_the_workers_to_judge():
    assert key_of(relayed({"messages": [], "user": 7}))[0] == "the body"


def test_without_a_field_the_key_of_a_relayed_call_is_its_body():
    one, other = ({"messages": [{"role": "user", "content": text}]} for text in ("hi", "ho"))
    assert key_of(relayed(one)) == key_of(relayed(one))
    assert key_of(relayed(one)) != key_of(relayed(other))


def test_keys_are_spread_over_ranks_and_go_to_the_one_that_the_client_asks_for():
    worker = make_worker("dp")
    assert worker.info
    worker.info = replace(worker.info, ranks=(0, 1))
    calls = [make_call(headers={"x-session-id": str(number)}) for number in range(20)]
    assert {POLICY.choose_worker(call, (worker,)).rank for call in calls} == {0, 1}
    assert {POLICY.choose_worker(replace(call, data_parallel_rank=1), (worker,)).rank for call in calls} == {1}


async def test_its_fields_are_known_while_it_is_in_force_and_only_then():
    lane = ScriptedLane([output(7, finish="stop")])
    rig = Rig(make_worker("a", lane), plugins=[ConsistentHash()], policies=["p0"])
    browser = await Browser({**BODY, "user": "u"}).ask(rig)
    assert (browser.status, browser.headers["x-headrace-route"]) == (200, "consistent-hash: by user")
    rig.routing.change(RoutingSettings())
    browser = await Browser({**BODY, "user": "u"}).ask(rig)
    assert (browser.status, browser.headers["x-headrace-route"]) == (200, "round-robin")
