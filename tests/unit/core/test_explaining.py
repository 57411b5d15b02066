"""Where a call would go, and why: every worker, every policy, and nothing that follows from asking."""

import pytest
from msgspec.structs import replace

from core.call import Call, Outcome
from core.errors import BadRequest, NoWorker
from core.explaining import Chosen, Explainer, PolicyVerdict
from core.hookspecs import Choice, hookimpl
from core.settings import RoutingRule, RoutingSettings
from core.wire.needs import GRPC_CAN
from tests.unit.core.lanes import ScriptedLane
from tests.unit.core.rig import Rig, make_call, make_worker


def worker(name, **options):
    return make_worker(name, ScriptedLane(), **options)


async def explain(rig, **call):
    return await Explainer(rig.registry, rig.fleet, rig.placer, rig.path).explain(make_call(**call))


def why(explanation):
    return {worker.id: worker.why for worker in explanation.workers}


class Passes:
    @hookimpl
    def choose_worker(self) -> None: ...


class LastRank:
    @hookimpl
    def choose_worker(self, workers) -> Choice:
        return Choice(workers[-1], "the last", workers[-1].info.ranks[-1])


class Refuses:
    @hookimpl
    def choose_worker(self) -> Choice:
        raise NoWorker("not at night")


class Fails:
    @hookimpl
    def choose_worker(self) -> Choice:
        raise LookupError("mine")


class Keeps:
    """Lets calls go to one worker only, or says why to none."""

    def __init__(self, name: str) -> None:
        self.name = name

    @hookimpl
    def eligible_workers(self, workers):
        kept = [each for each in workers if each.id == self.name]
        if not kept:
            raise NoWorker("the adapter is nowhere")
        return kept


async def test_every_policy_says_what_it_would_do_and_the_first_with_a_worker_decides():
    rig = Rig(worker("a"), worker("b"), plugins=[Passes(), LastRank()], policies=["p0", "p1", "round-robin"])
    explanation = await explain(rig)
    assert explanation.policies == [
        PolicyVerdict("p0", None, None, "leaves it to the next policy"),
        PolicyVerdict("p1", "b", 0, "the last"),
        PolicyVerdict("round-robin", "a", None, "round-robin"),
    ]
    assert explanation.choice == Chosen("b", 0, "grpc", "p1", "the last")
    assert (explanation.waits, explanation.error) == (False, None)


async def test_only_the_policies_of_the_rule_that_fits_are_asked():
    routing = RoutingSettings(policies=["p0"], rules=[RoutingRule(policies=["round-robin"], model="tiny")])
    explanation = await explain(Rig(worker("a"), plugins=[LastRank()], routing=routing))
    assert [verdict.policy for verdict in explanation.policies] == ["round-robin"]


async def test_nothing_follows_from_asking():
    rig = Rig(worker("a"), worker("b"))
    assert [(await explain(rig)).policies[0].worker for _ in range(3)] == ["a"] * 3
    assert rig.in_flight == [0, 0]
    assert [outcome.kind for outcome in rig.witness.outcomes] == ["cancelled"] * 3


async def test_plugins_receive_the_call_and_are_told_of_its_end():
    seen = []

    class Counts:
        @hookimpl
        def receive_call(self, call: Call) -> None:
            seen.append("received")

        @hookimpl
        def call_settled(self, call: Call, outcome: Outcome) -> None:
            seen.append("settled")

    await explain(Rig(worker("a"), plugins=[Counts()]))
    with pytest.raises(BadRequest, match="nobody_knows"):
        await explain(Rig(worker("a"), plugins=[Counts()]), unclaimed={"nobody_knows": b"1"})
    assert seen == ["received", "settled"] * 2


async def test_a_worker_that_cannot_take_the_call_says_why():
    http = make_worker("http", ScriptedLane(can=frozenset(), wire="http"))
    behind = worker("behind")
    behind.find_version("1")
    workers = (worker("a"), worker("gone", state="gone"), worker("other", models=["x"]), worker("p", role="prefill"), http, behind)
    workers[0].find_version("2")
    rig = Rig(*workers, routing=RoutingSettings(max_version_lag=0))
    need = min(GRPC_CAN)
    explanation = await explain(rig, model="tiny", needs={need})
    assert why(explanation) == {
        "a": "",
        "gone": "is gone (gone in a test)",
        "other": "serves x",
        "p": "is for prefill only",
        "http": "is behind: it has version None, and 2 is there",
        "behind": "is behind: it has version 1, and 2 is there",
    }
    assert [each.eligible for each in explanation.workers] == [True, False, False, False, False, False]
    http.find_version("2")
    assert why(await explain(rig, model="tiny", needs={need}))["http"] == f"has no wire that carries {need}"
    assert why(await explain(rig, model="tiny", role="prefill"))["a"] == "is aggregated, and the call wants prefill"


async def test_a_plugin_that_keeps_a_call_off_a_worker_is_named():
    explanation = await explain(Rig(worker("a"), worker("b"), plugins=[Keeps("b")]))
    assert why(explanation) == {"a": "is not for this call, says p0", "b": ""}
    assert explanation.choice
    assert explanation.choice.worker == "b"


async def test_a_plugin_that_refuses_every_worker_is_quoted():
    explanation = await explain(Rig(worker("a"), plugins=[Keeps("nobody")]))
    assert why(explanation) == {"a": "is refused by p0: the adapter is nowhere"}
    assert (explanation.choice, explanation.error, explanation.policies) == (None, "the adapter is nowhere", [])


async def test_a_policy_that_refuses_or_fails_is_quoted():
    explanation = await explain(Rig(worker("a"), plugins=[Refuses()], policies=["p0"]))
    assert explanation.policies == [PolicyVerdict("p0", None, None, "refuses the call: not at night")]
    assert explanation.error == "not at night"
    explanation = await explain(Rig(worker("a"), plugins=[Fails()], policies=["p0"]))
    assert explanation.policies == [PolicyVerdict("p0", None, None, "fails: LookupError")]
    assert explanation.error == "plugin 'p0' failed in choose_worker: LookupError"


async def test_a_call_whose_workers_are_paused_would_wait():
    explanation = await explain(Rig(worker("a", state="paused")))
    assert (explanation.choice, explanation.waits, explanation.error) == (None, True, None)


async def test_a_call_that_could_go_nowhere_has_the_error_that_it_would_get():
    explanation = await explain(Rig(worker("a", models=["x"]), worker("b", models=["y"])))
    assert (explanation.choice, explanation.error) == (None, "model: the fleet serves x, y; name one")


async def test_the_rank_that_the_client_asks_for_is_shown():
    dp = worker("a")
    assert dp.info
    dp.info = replace(dp.info, ranks=(0, 1))
    explanation = await explain(Rig(dp), data_parallel_rank=1)
    assert explanation.choice == Chosen("a", 1, "grpc", "round-robin", "round-robin")
