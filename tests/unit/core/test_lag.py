"""max_version_lag: calls are kept off workers that are behind the newest policy version of their model."""

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from core.errors import NoWorker
from core.fleet.worker import Hold
from core.lag import behind
from core.settings import RoutingSettings, SettingsError, parse_settings
from tests.unit.core.lanes import ScriptedLane, output
from tests.unit.core.rig import Browser, Rig, make_call, make_worker


def found(name, version, **options):
    """A worker whose version its probes have found."""
    worker = make_worker(name, ScriptedLane([output(7, finish="stop")]), **options)
    worker.find_version(version)
    return worker


def late(*versions, allowed=0):
    return [worker.id for worker in behind([found(str(i), version) for i, version in enumerate(versions)], allowed)]


def rig_of(*workers, lag=0):
    return Rig(*workers, routing=RoutingSettings(max_version_lag=lag))


async def asked(rig, count=4):
    return {(await Browser().ask(rig)).headers.get("x-headrace-worker") for _ in range(count)}


@pytest.mark.parametrize(
    ("versions", "allowed", "expected"),
    [
        (["7", "7"], 0, []),
        (["7", "8"], 0, ["0"]),
        (["7", "8"], 1, []),
        (["9", "10", "8"], 1, ["2"]),
        (["99", "100"], 0, ["0"]),
        (["default", "1"], 5, ["0"]),
        ([None, "1"], 5, ["0"]),
        ([None, None], 0, []),
        ([], 0, []),
        (["9" * 400, "3"], 0, ["0"]),  # no number that anybody counts to
    ],
)
def test_numbers_are_compared_by_how_far_they_are_apart(versions, allowed, expected):
    assert late(*versions, allowed=allowed) == expected


def test_of_other_labels_the_latest_that_was_given_through_headrace_is_the_newest():
    workers = [found(name, "old") for name in "abc"]
    workers[1].policy_version = "new"
    assert [worker.id for worker in behind(workers, 5)] == ["a", "c"]
    workers[2].find_version("default")  # started anew
    assert [worker.id for worker in behind(workers, 5)] == ["a", "c"]


def test_of_other_labels_that_were_only_found_the_commonest_is_the_newest():
    assert late("blue", "green", "blue") == ["1"]


@pytest.mark.parametrize("state", ["ready", "paused", "updating", "quarantined", "draining"])
def test_whoever_is_there_is_a_measure(state):
    workers = [found("a", "7"), found("b", "8", state=state)]
    assert [worker.id for worker in behind(workers, 0)] == ["a"]


def test_workers_that_are_gone_are_no_measure():
    assert behind([found("a", "7"), found("b", "8", state="gone"), found("c", "8", state="starting")], 0) == {}


def test_a_worker_that_is_held_out_for_having_other_weights_is_no_measure():
    stranger = found("b", "1000", state="quarantined")
    stranger.hold = Hold("quarantined", "it has the weights '1000' and should have '7'", late=True)
    assert behind([found("a", "7"), stranger], 0) == {}


async def test_without_the_setting_every_version_is_served():
    assert await asked(Rig(found("a", "7"), found("b", "8"))) == {"a", "b"}


async def test_workers_that_are_behind_get_no_calls():
    workers = found("a", "7"), found("b", "9"), found("c", "8")
    assert await asked(rig_of(*workers)) == {"b"}
    assert await asked(rig_of(*workers, lag=1)) == {"b", "c"}
    assert await asked(rig_of(*workers, lag=2)) == {"a", "b", "c"}


async def test_each_model_has_versions_of_its_own():
    rig = rig_of(found("a", "7", models=["x"]), found("b", "8", models=["y"]))
    assert rig.placer.place(make_call(model="x"), {}).worker.id == "a"


async def test_when_the_newest_are_only_paused_calls_wait_for_them_at_the_gate():
    old, new = found("a", "7"), found("b", "8", state="paused")
    rig, browser = rig_of(old, new), Browser()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(browser.ask, rig)
        await wait_all_tasks_blocked()
        assert rig.fleet.gate.waiting == 1
        rig.move(new, "ready", "")
    assert browser.headers["x-headrace-worker"] == "b"


async def test_a_call_that_waits_goes_to_a_worker_that_has_caught_up():
    old, new = found("a", "7"), found("b", "8", state="paused")
    rig, browser = rig_of(), Browser()
    for worker in (old, new):
        rig.fleet.admit(worker)
    rig.move(new, "paused")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(browser.ask, rig)
        await wait_all_tasks_blocked()
        old.policy_version = "8"
    assert browser.headers["x-headrace-worker"] == "a"


async def test_when_the_newest_has_failed_under_a_call_the_503_says_who_is_behind():
    old, new = found("a", "7"), found("b", "8")
    rig = rig_of(old, new)
    with pytest.raises(NoWorker) as raised:
        rig.placer.place(make_call(), {new: "it was lost"})
    assert raised.value.message == "no worker is left: b (it was lost), a (is behind: it has version 7, and 8 is there)"
    assert not rig.placer.has_other(make_call(), {}, new)


async def test_when_the_newest_is_quarantined_a_call_is_refused_rather_than_served_with_older_weights():
    old, new = found("a", "7"), found("b", "8")
    rig = rig_of(old, new)
    rig.move(new, "quarantined", "smoke")
    browser = await Browser().ask(rig)
    assert browser.status == 503
    assert browser.json["error"]["message"] == (
        "no worker is ready: a is behind: it has version 7, and 8 is there, b is quarantined (smoke)"
    )


async def test_a_call_that_waits_for_newer_weights_goes_on_when_the_lag_is_allowed():
    old, new = found("a", "7"), found("b", "8", state="paused")
    rig, browser = rig_of(old, new), Browser()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(browser.ask, rig)
        await wait_all_tasks_blocked()
        assert rig.fleet.gate.waiting == 1
        rig.routing.change(RoutingSettings())
    assert browser.headers["x-headrace-worker"] == "a"


async def test_when_the_newest_is_gone_the_next_one_is_the_newest():
    old, new = found("a", "7"), found("b", "8")
    rig = rig_of(old, new)
    rig.move(new, "gone")
    assert await asked(rig) == {"a"}


def test_the_setting_is_a_number_from_0():
    assert parse_settings("routing.max_version_lag = 2").routing.max_version_lag == 2
    with pytest.raises(SettingsError, match=r"routing.max_version_lag: Expected `int` >= 0"):
        parse_settings("routing.max_version_lag = -1")
