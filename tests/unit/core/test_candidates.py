from core.candidates import CandidatesByKind
from tests.unit.core.lanes import ScriptedLane
from tests.unit.core.rig import Rig, make_call, make_worker


def test_calls_of_one_kind_have_the_same_candidates_until_the_fleet_changes():
    a, b = make_worker("a", ScriptedLane([])), make_worker("b", ScriptedLane([]))
    rig = Rig(a, b)
    candidates = CandidatesByKind(rig.fleet)
    first = candidates.of(make_call(id="1"))
    assert candidates.of(make_call(id="2")) is first
    assert first.workers == (a, b)
    rig.move(a, "paused")
    assert candidates.of(make_call()).workers == (b,)
    rig.move(a, "ready")
    assert candidates.of(make_call()).workers == (a, b)


def test_another_kind_of_call_has_others():
    a, b = make_worker("a", ScriptedLane([])), make_worker("b", ScriptedLane([], can=frozenset({"routed_experts"})), models=("big",))
    candidates = CandidatesByKind(Rig(a, b).fleet)
    assert candidates.of(make_call()).models == {"tiny", "big"}
    assert candidates.of(make_call(model="big")).workers == (b,)
    assert set(candidates.of(make_call(needs={"routed_experts"})).lanes) == {b}
    assert candidates.of(make_call(model="none")).workers == ()


def test_who_asks_for_ever_new_models_is_not_remembered_for_ever():
    candidates = CandidatesByKind(Rig(make_worker("a", ScriptedLane([]))).fleet)
    for number in range(5000):
        candidates.of(make_call(model=str(number)))
    assert len(candidates._known) <= 1001
