"""Which policies place a call, by rules that may change while calls are in flight."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import trio
from structlog.testing import capture_logs
from trio.testing import wait_all_tasks_blocked

from core.call import Call
from core.errors import NoWorker, PluginFault
from core.fleet.worker import Worker
from core.hookspecs import Choice, hookimpl
from core.settings import RoutingRule, RoutingSettings, SettingsError, parse_settings
from tests.unit.core.lanes import ScriptedLane, output
from tests.unit.core.rig import Browser, Rig, make_call, make_worker


class First:
    """A policy that takes the first worker, and counts what is in flight there."""

    def __init__(self) -> None:
        self.load: Counter[str] = Counter()

    @hookimpl
    def choose_worker(self, workers) -> Choice:
        return Choice(workers[0], "first")

    @hookimpl
    def attempt_started(self, call: Call, choice: Choice) -> None:
        self.load[choice.worker.id] += 1

    @hookimpl
    def attempt_ended(self, call: Call, choice: Choice) -> None:
        self.load[choice.worker.id] -= 1


class Passes:
    """A policy that leaves every call to the next one."""

    @hookimpl
    def choose_worker(self) -> None: ...


class Sleeps(Passes):
    """One that says which calls."""

    passes = "calls at night"


class Returns:
    """A policy that returns what it is told to."""

    def __init__(self, returned: Callable[[Sequence[Worker]], object]) -> None:
        self.returned = returned

    @hookimpl
    def choose_worker(self, workers: Sequence[Worker]) -> object:
        return self.returned(workers)


def answering(name, **options):
    return make_worker(name, ScriptedLane([output(7, finish="stop")]), **options)


def rules(*rules, default="round-robin"):
    return RoutingSettings(policies=[default], rules=[RoutingRule(**rule) for rule in rules])


def route(rig, **call):
    return rig.placer.place(make_call(**call), {}).reason


def test_policies_are_asked_in_their_order_until_one_chooses():
    rig = Rig(answering("a"), plugins=[Passes(), First()], policies=["p0", "p1", "round-robin"])
    assert route(rig) == "first"


def test_a_rank_that_was_asked_for_takes_nothing_else_from_a_choice():
    class Knows:
        @hookimpl
        def choose_worker(self, workers) -> Choice:
            return Choice(workers[0], "knows", cached_tokens=5)

    rig = Rig(answering("a"), plugins=[Knows()], policies=["p0"])
    choice = rig.placer.place(make_call(data_parallel_rank=0), {}).choice
    assert (choice.reason, choice.rank, choice.cached_tokens) == ("knows", 0, 5)


def test_when_every_policy_passes_there_is_no_worker():
    rig = Rig(answering("a"), plugins=[Passes(), Sleeps()], policies=["p0", "p1"])
    with pytest.raises(NoWorker) as raised:
        route(rig)
    assert raised.value.message == (
        "no routing policy chose a worker: p0 leaves it to the next policy, p1 leaves calls at night to the next policy; "
        "name another one after them"
    )


def test_who_names_a_policy_last_that_leaves_calls_to_the_next_one_is_warned():
    settings = RoutingSettings(policies=["p0", "p1"], rules=[RoutingRule(["p1", "p0"])])
    rig = Rig(answering("a"), plugins=[First(), Sleeps()])
    with capture_logs() as lines:
        rig.routing.change(settings)
    assert [(line["event"], line["policies"], line["reason"]) for line in lines] == [
        ("routing.leaves_calls", ["p0", "p1"], "p1 leaves calls at night to a next policy: they get 503")
    ]


def test_a_policy_that_is_named_twice_is_refused():
    with pytest.raises(SettingsError, match=r"routing.rules\[0\].policies: 'round-robin' is named twice"):
        Rig(answering("a")).routing.change(rules({"policies": ["round-robin", "round-robin"]}))


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda workers: "a", "it returned str instead of a Choice or None"),
        (lambda workers: Choice(answering("b"), "mine"), "it chose b, which is not one of the workers that it was given"),
        (lambda workers: Choice(cast("Any", "a"), "mine"), "it chose str, which is not one of the workers that it was given"),
        (lambda workers: Choice(workers[0], cast("Any", 7)), "the reason of its choice is int instead of a text"),
        (lambda workers: Choice(workers[0], "mine", 3), "it chose rank 3 of a, which has 0"),
    ],
)
def test_what_is_wrong_with_a_choice_is_told(returned, message):
    rig = Rig(answering("a"), plugins=[Returns(returned)], policies=["p0"])
    with pytest.raises(PluginFault) as raised:
        route(rig)
    assert raised.value.message == f"plugin 'p0' failed in choose_worker: {message}"


async def test_no_reason_can_break_the_reply_header():
    rig = Rig(answering("a"), plugins=[Returns(lambda workers: Choice(workers[0], "é\r\nx: y" + "z" * 100_000))], policies=["p0"])
    browser = await Browser().ask(rig)
    assert browser.status == 200
    assert browser.headers["x-headrace-route"] == f"?  x: y{'z' * 493}? (100,007 characters)"


def test_a_rule_is_for_a_model_under_any_of_its_names():
    workers = (answering("a", models=["tiny", "alias"]), answering("b", models=["large"]))
    rig = Rig(*workers, plugins=[First()], routing=rules({"model": "tiny", "policies": ["p0"]}))
    assert [route(rig, model=model) for model in ("tiny", "alias", "large")] == ["first", "first", "round-robin"]


def test_a_rule_for_a_model_counts_where_the_call_need_not_name_it():
    assert route(Rig(answering("a"), plugins=[First()], routing=rules({"model": "tiny", "policies": ["p0"]}))) == "first"


def test_a_rule_is_for_a_role_and_calls_without_one_are_aggregated():
    workers = (answering("p", role="prefill"), answering("d", role="decode"), answering("a"))
    rig = Rig(*workers, plugins=[First()], routing=rules({"role": "prefill", "policies": ["p0"]}))
    assert [route(rig, role=role) for role in ("prefill", "decode", None)] == ["first", "round-robin", "round-robin"]
    rig = Rig(*workers, plugins=[First()], routing=rules({"role": "aggregated", "policies": ["p0"]}))
    assert [route(rig, role=role) for role in ("prefill", "decode", None)] == ["round-robin", "round-robin", "first"]


def test_a_rule_for_decode_workers_is_for_the_calls_that_they_do_whole_too():
    workers = (answering("p", role="prefill"), answering("d", role="decode"), answering("e", role="decode"))
    for role, reasons in (("decode", ["first", "first"]), ("aggregated", ["round-robin", "round-robin"])):
        rig = Rig(*workers, plugins=[First()], routing=rules({"role": role, "policies": ["p0"]}))
        assert [route(rig, role=asked) for asked in (None, "decode")] == reasons
    mixed = Rig(*workers, answering("a"), plugins=[First()], routing=rules({"role": "decode", "policies": ["p0"]}))
    assert route(mixed) == "round-robin", "an aggregated worker may take it, too"


def test_the_first_rule_that_fits_counts():
    rig = Rig(answering("a"), plugins=[First()], routing=rules({"policies": ["round-robin"]}, {"policies": ["p0"]}, default="p0"))
    assert route(rig) == "round-robin"


def test_an_unknown_policy_is_refused_with_the_key_and_the_nearest():
    rig = Rig(answering("a"))
    with pytest.raises(
        SettingsError, match=r"routing.rules\[1\].policies: no loaded plugin 'round-robbin' chooses workers: did you mean 'round-robin'\?"
    ):
        rig.routing.change(rules({"policies": ["round-robin"]}, {"policies": ["round-robbin"]}))
    assert rig.routing.settings == RoutingSettings()


def test_rules_come_from_the_settings():
    text = '[routing]\npolicies = ["a"]\n[[routing.rules]]\nmodel = "tiny"\nrole = "prefill"\npolicies = ["b", "c"]'
    assert parse_settings(text).routing.rules == [RoutingRule(policies=["b", "c"], model="tiny", role="prefill")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[routing.rules]]\nmodel = 'x'", r"routing.rules\[0\].policies: this field is required"),
        ("[[routing.rules]]\npolicies = []", r"routing.rules\[0\].policies: Expected `array` of length >= 1"),
        ("[[routing.rules]]\npolicies = ['a']\nmodle = 'x'", r"unknown key routing.rules\[0\].modle: did you mean 'model'\?"),
    ],
)
def test_a_rule_that_is_none_is_refused(text, message):
    with pytest.raises(SettingsError, match=message):
        parse_settings(text)


async def test_a_policy_that_comes_into_force_and_leaves_again_counts_what_is_in_flight():
    plugin, done = First(), trio.Event()
    rig = Rig(make_worker("a", ScriptedLane([done, output(7, finish="stop")])), plugins=[plugin])
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(Browser().ask, rig)
        await wait_all_tasks_blocked()
        assert plugin.load == {}
        rig.routing.change(RoutingSettings(policies=["p0"]))
        assert plugin.load == {"a": 3}
        rig.routing.change(RoutingSettings())
        assert plugin.load == {"a": 0}
        rig.routing.change(rules({"policies": ["p0"]}))
        assert plugin.load == {"a": 3}
        done.set()
    assert plugin.load == {"a": 0}
    assert route(rig) == "first"


async def test_an_attempt_that_a_policy_never_heard_of_does_not_end_for_it():
    plugin, done = First(), trio.Event()
    rig = Rig(make_worker("a", ScriptedLane([done, output(7, finish="stop")])), plugins=[plugin], policies=["p0"])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Browser().ask, rig)
        await wait_all_tasks_blocked()
        rig.routing.change(RoutingSettings())
        done.set()
    assert plugin.load == {"a": 0}
