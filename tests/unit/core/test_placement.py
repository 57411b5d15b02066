"""Where a call goes, and what it is told when it can't go anywhere."""

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from core.call import Call
from core.errors import BadRequest, CallError, NotFound, NoWorker, PluginFault
from core.fleet.gate import Gate
from core.hookspecs import Choice, hookimpl
from core.settings import GateSettings
from core.wire.needs import GRPC_CAN, OVER_HTTP, RUST_HTTP_CAN
from tests.unit.core.lanes import ScriptedLane
from tests.unit.core.rig import Rig, make_call, make_worker


def refusal(rig, tried=None, **call) -> CallError:
    with pytest.raises(CallError) as raised:
        rig.placer.place(make_call(**call), tried or {})
    return raised.value


def worker(name, **options):
    return make_worker(name, ScriptedLane(), **options)


def placed_on(rig, **call):
    """Every worker that would get it in the end."""
    tried = {}
    while len(tried) < len(rig.workers):
        try:
            tried[rig.placer.place(make_call(**call), tried).worker] = "tried"
        except NoWorker:
            break
    return {worker.id for worker in tried}


def test_a_model_that_the_fleet_does_not_serve_is_a_404_with_those_that_it_does():
    error = refusal(Rig(worker("a", models=["tiny", "alias"])), model="nope")
    assert isinstance(error, NotFound)
    assert (error.message, error.param) == ("The model `nope` does not exist. The fleet serves alias, tiny.", "model")


def test_an_alias_is_as_good_as_the_name():
    assert Rig(worker("a", models=["tiny", "alias"])).placer.place(make_call(model="alias"), {}).worker.id == "a"


def test_an_empty_fleet_is_a_503():
    error = refusal(Rig())
    assert isinstance(error, NoWorker)
    assert (error.status, error.message, error.retry_after) == (503, "no worker is ready: the fleet is empty", 1)


def test_an_empty_fleet_names_the_workers_that_are_being_started():
    rig = Rig()
    rig.fleet.coming |= {"stand-in-1", "stand-in-0"}
    assert refusal(rig).message == "no worker is ready: stand-in-0 is being started, stand-in-1 is being started"


def test_a_fleet_that_was_never_reached_is_a_503_and_no_model_is_unknown_yet():
    lost = worker("a", state="starting")
    lost.info = None
    error = refusal(Rig(lost), model="tiny")
    assert (error.status, error.message) == (503, "no worker is ready: a is starting (starting in a test)")


def test_a_model_whose_workers_are_gone_is_a_503_and_not_a_404():
    assert refusal(Rig(worker("a", models=["x"], state="gone"), worker("b", models=["y"])), model="x").status == 503


def test_a_call_without_a_model_is_refused_when_there_are_several():
    error = refusal(Rig(worker("a", models=["x"]), worker("b", models=["y"])))
    assert isinstance(error, BadRequest)
    assert (error.message, error.param) == ("model: the fleet serves x, y; name one", "model")


def test_a_call_without_a_role_goes_to_no_worker_that_does_a_part_of_calls_only():
    workers = [worker(role, role=role) for role in ("prefill", "encode", "decode", "aggregated")]
    assert placed_on(Rig(*workers)) == {"decode", "aggregated"}


def test_a_call_with_a_role_goes_to_workers_of_that_role():
    workers = [worker(role, role=role) for role in ("prefill", "decode", "aggregated")]
    assert placed_on(Rig(*workers), role="prefill") == {"prefill"}
    assert placed_on(Rig(*workers), role="decode") == {"decode"}


def test_a_role_that_nobody_has_is_a_503_that_names_what_there_is():
    error = refusal(Rig(worker("p", role="prefill"), worker("d", role="decode", state="gone")))
    assert error.message == "no worker is ready: p is for prefill only, d is gone (gone in a test)"


def test_a_need_that_no_worker_serves_is_a_400_that_says_who_would():
    error = refusal(Rig(worker("a")), needs={"sampling_params.bad_words", "sampling_params.stop"})
    assert error.status == 400
    assert error.message == "no worker can serve sampling_params.bad_words (needs the Python HTTP server or the Rust HTTP server)"
    assert error.param == "sampling_params.bad_words"


def test_a_worker_whose_http_server_would_serve_it_if_it_took_calls_is_named_with_why_it_takes_none():
    closed = worker("a")
    closed.http_closed = "its HTTP server is closed"
    rig = Rig(closed, worker("b"))
    why = "; a: its HTTP server is closed"
    assert refusal(rig, needs={"sampling_params.bad_words"}).message.endswith(why)
    assert why not in refusal(rig, needs={"unknown"}).message


def test_needs_that_no_single_wire_serves_are_all_named():
    both = make_worker("a", ScriptedLane(), ScriptedLane(wire="http", can=RUST_HTTP_CAN))
    error = refusal(Rig(both), needs={"sampling_params.bad_words", "sampling_params.stop"})
    assert "sampling_params.bad_words" in error.message
    assert "sampling_params.stop" in error.message


def test_a_need_that_a_plugin_added_is_refused_by_the_field_that_it_added_it_for():
    call = make_call()
    call.need(OVER_HTTP, by="content_parts")
    with pytest.raises(BadRequest) as raised:
        Rig(worker("a")).placer.place(call, {})
    assert raised.value.message == "no worker can serve content_parts (needs the Python HTTP server or the Rust HTTP server)"
    assert raised.value.param == "content_parts"


def test_the_first_lane_that_serves_the_needs_is_taken():
    both = make_worker("a", ScriptedLane(can=GRPC_CAN), ScriptedLane(wire="http", can=RUST_HTTP_CAN))
    rig = Rig(both)
    assert rig.placer.place(make_call(), {}).lane.wire == "grpc"
    assert rig.placer.place(make_call(needs={"sampling_params.bad_words"}), {}).lane.wire == "http"


def test_only_workers_whose_wire_serves_the_needs_are_offered():
    http = make_worker("h", ScriptedLane(wire="http", can=RUST_HTTP_CAN))
    rig = Rig(worker("a"), http, worker("b"))
    for _ in range(3):
        assert rig.placer.place(make_call(needs={"sampling_params.bad_words"}), {}).worker is http


def test_workers_that_were_lost_are_not_offered_again():
    a, b = worker("a"), worker("b")
    rig = Rig(a, b)
    assert {rig.placer.place(make_call(), {a: "reset"}).worker.id for _ in range(4)} == {"b"}
    assert refusal(rig, {a: "reset", b: "refused"}).message == "no worker is left: a (reset), b (refused)"


class Narrows:
    def __init__(self, answer):
        self.answer = answer

    @hookimpl
    def eligible_workers(self, workers):
        return self.answer(workers)


def test_what_every_plugin_has_kept_is_eligible():
    a, b, c = worker("a"), worker("b"), worker("c")
    narrows = [Narrows(lambda w: w[:2]), Narrows(lambda _: None), Narrows(lambda w: (one for one in w if one is not a))]
    rig = Rig(a, b, c, plugins=narrows)
    assert {rig.placer.place(make_call(), {}).worker for _ in range(4)} == {b}


def test_nobody_eligible_is_a_503():
    assert refusal(Rig(worker("a"), plugins=[Narrows(lambda _: [])])).message == "no worker is eligible for this call"


def test_the_candidates_are_those_that_a_policy_would_be_given():
    http = make_worker("b", ScriptedLane(wire="http", can=RUST_HTTP_CAN))
    rig = Rig(worker("a"), http, worker("c"), plugins=[Narrows(lambda workers: workers[:2])])
    assert [found.id for found in rig.placer.candidates(make_call())] == ["a", "b"]
    assert [found.id for found in rig.placer.candidates(make_call(needs={OVER_HTTP}))] == ["b"]
    for refused in ({"needs": {"sampling_params.trace_decode_token_ids"}}, {"data_parallel_rank": 5}, {"model": "nope"}):
        with pytest.raises(CallError) as raised:
            rig.placer.candidates(make_call(**refused))
        assert raised.value.message == refusal(rig, **refused).message


def test_a_worker_that_a_plugin_makes_up_is_never_eligible():
    assert refusal(Rig(worker("a"), plugins=[Narrows(lambda _: [worker("x")])])).status == 503


@pytest.mark.parametrize("choice", [Choice(worker("x"), "made up"), "a", 3])
def test_a_choice_that_is_not_one_of_the_eligible_workers_is_a_fault(choice):
    class Chooses:
        @hookimpl
        def choose_worker(self):
            return choice

    error = refusal(Rig(worker("a"), plugins=[Chooses()], policies=["p0"]))
    assert isinstance(error, PluginFault)
    assert error.status == 500


def test_policies_that_all_pass_are_a_503():
    class Passes:
        @hookimpl
        def choose_worker(self, call: Call) -> None: ...

    assert refusal(Rig(worker("a"), plugins=[Passes()], policies=["p0"])).message.startswith("no routing policy chose a worker")


# --- the gate ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["paused", "updating"])
async def test_a_call_waits_while_every_worker_for_it_is_held(state):
    rig = Rig(worker("a", state=state))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.placer.gate, make_call(), {})
        await wait_all_tasks_blocked()
        assert rig.fleet.gate.waiting == 1
        rig.move(rig.workers[0], "ready")
    assert rig.fleet.gate.waiting == 0


@pytest.mark.parametrize("state", ["starting", "gone", "quarantined", "draining"])
async def test_a_call_does_not_wait_for_a_worker_that_may_never_come(state):
    await Rig(worker("a", state=state)).placer.gate(make_call(), {})


async def test_a_call_does_not_wait_while_one_worker_for_it_is_ready():
    await Rig(worker("a", state="paused"), worker("b")).placer.gate(make_call(), {})


async def test_a_call_does_not_wait_for_another_models_workers():
    await Rig(worker("a", models=["x"], state="paused")).placer.gate(make_call(model="y"), {})


async def test_a_worker_that_dies_while_calls_wait_for_it_lets_them_go_on_to_their_refusal():
    rig = Rig(worker("a", state="paused"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.placer.gate, make_call(), {})
        await wait_all_tasks_blocked()
        rig.move(rig.workers[0], "gone")
    assert refusal(rig).status == 503


async def test_a_gate_that_opens_and_closes_at_once_holds_the_call():
    rig = Rig(worker("a", state="paused"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.placer.gate, make_call(), {})
        await wait_all_tasks_blocked()
        rig.move(rig.workers[0], "ready")
        rig.move(rig.workers[0], "paused")
        await wait_all_tasks_blocked()
        assert rig.fleet.gate.waiting == 1
        rig.move(rig.workers[0], "ready")


async def test_an_open_gate_is_no_checkpoint():
    with trio.CancelScope() as scope:
        scope.cancel()
        await Gate(GateSettings()).wait_while(lambda: False)
    assert not scope.cancelled_caught


async def test_the_wait_is_bounded_in_time(autojump_clock):
    gate = Gate(GateSettings(timeout=30))
    start = trio.current_time()
    with pytest.raises(NoWorker, match=r"the fleet was paused for 30 s \(gate.timeout\)"):
        await gate.wait_while(lambda: True)
    assert trio.current_time() - start == pytest.approx(30)
    assert gate.waiting == 0


async def test_the_wait_is_bounded_in_number():
    gate = Gate(GateSettings(max_waiting=2))
    async with trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(gate.wait_while, lambda: True)
        await wait_all_tasks_blocked()
        with pytest.raises(NoWorker, match="2 calls wait already"):
            await gate.wait_while(lambda: True)
        nursery.cancel_scope.cancel()
    assert gate.waiting == 0


async def test_a_change_that_does_not_help_leaves_the_call_waiting_within_the_same_time(autojump_clock):
    gate = Gate(GateSettings(timeout=30))
    start = trio.current_time()

    async def poke():
        while True:
            await trio.sleep(7)
            gate.notify()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(poke)
        with pytest.raises(NoWorker):
            await gate.wait_while(lambda: True)
        nursery.cancel_scope.cancel()
    assert trio.current_time() - start == pytest.approx(30)
