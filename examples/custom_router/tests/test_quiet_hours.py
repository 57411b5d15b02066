import pytest
from quiet_hours import QuietHours, Settings

from core import Choice
from core.testing import make_call, make_worker


@pytest.fixture
def headrace_plugins():
    return {"quiet-hours": QuietHours(Settings(worker="b", longer_than=3))}


def test_a_long_prompt_goes_to_the_night_shift():
    day, night = make_worker("day"), make_worker("night")
    policy = QuietHours(Settings(longer_than=3))
    assert policy.choose_worker(make_call(1, 2, 3, 4), [day, night]) == Choice(night, "quiet-hours: 4 tokens")


def test_without_its_machine_the_next_policy_decides():
    assert QuietHours(Settings(longer_than=3)).choose_worker(make_call(1, 2, 3, 4), [make_worker("day")]) is None


async def test_a_reply_says_where_it_came_from_and_why(headrace):
    long, short = await headrace.generate(1, 2, 3, 4), await headrace.generate(1, 2, 3)
    assert (long.headers["x-headrace-worker"], long.headers["x-headrace-route"]) == ("b", "quiet-hours: 4 tokens")
    assert short.headers["x-headrace-worker"] == "a"
    assert [len(headrace.lanes[name].requests) for name in "ab"] == [1, 1]


@pytest.fixture
def headrace_settings():
    return """
        [routing]
        policies = ["quiet-hours", "round-robin"]
        [plugins.quiet-hours]
        worker = "stand-in-1"
        longer_than = 3
    """


async def test_it_is_found_by_its_entry_point_and_places_real_calls(headrace_on_stand_ins):
    reply = await headrace_on_stand_ins.generate(1, 2, 3, 4)
    assert (reply.status_code, reply.headers["x-headrace-worker"]) == (200, "stand-in-1")
