"""Plugins: which are loaded, in which order their hooks run, and who is to blame when one fails."""

import pytest
import trio

from core.call import Call
from core.errors import BadRequest, PluginFault
from core.fleet.worker import Worker
from core.hookspecs import Choice, hookimpl
from core.registry import Loaded, Registry
from core.settings import SettingsError
from tests.unit.core.lanes import ScriptedLane
from tests.unit.core.rig import make_call, make_worker


def noting(name, notes, **options):
    class Notes:
        @hookimpl(**options)
        def receive_call(self, call: Call) -> None:
            notes.append(name)

    return Loaded(name, Notes())


def choosing(name, notes):
    class Notes:
        @hookimpl
        def receive_call(self, call: Call) -> None:
            notes.append(f"receive {name}")

        @hookimpl
        def choose_worker(self, call: Call) -> Choice | None:
            notes.append(f"choose {name}")

        @hookimpl
        def call_settled(self, call: Call) -> None:
            notes.append(f"settled {name}")

        @hookimpl
        def worker_joined(self, worker: Worker) -> None:
            notes.append(f"joined {name}")

    return Loaded(name, Notes())


def test_hooks_run_in_the_order_of_the_policies_and_then_by_name():
    notes = []
    registry = Registry([noting("b", notes), choosing("d", notes), noting("a", notes), choosing("c", notes)], ["d", "c"])
    registry.call("receive_call", call=make_call())
    assert notes == ["receive d", "receive c", "a", "b"]
    assert [p.name for p in registry.plugins] == ["d", "c", "a", "b"]


def test_tryfirst_and_trylast_override_that_order():
    notes = []
    registry = Registry([noting("a", notes, trylast=True), noting("b", notes), noting("c", notes, tryfirst=True)])
    registry.call("receive_call", call=make_call())
    assert notes == ["c", "b", "a"]


def test_a_policy_takes_part_in_calls_while_it_is_enforced_and_hears_of_the_fleet_always():
    notes = []
    registry = Registry([choosing("a", notes), choosing("b", notes), noting("c", notes)], ["a"])

    def live() -> list[str]:
        notes.clear()
        registry.call("receive_call", call=make_call())
        registry.tell("call_settled", call=make_call(), outcome=None)
        registry.tell("worker_joined", worker=make_worker("w"))
        return list(notes)

    assert live() == ["receive a", "c", "settled a", "joined a", "joined b"]
    registry.enforce(["b"])
    assert live() == ["receive b", "c", "settled b", "joined a", "joined b"]
    registry.enforce([])
    assert live() == ["c", "joined a", "joined b"]


def test_one_policy_is_asked_by_its_name():
    notes = []
    registry = Registry([choosing("a", notes), choosing("b", notes)], ["a"])
    assert registry.choose("b", make_call(), ()) is None
    assert notes == ["choose b"]


@pytest.mark.parametrize("choice", ["a", Choice(make_worker("other"), "mine"), Choice(make_worker("w"), "mine", 7)])
def test_a_choice_that_is_none_is_the_fault_of_its_policy(choice):
    worker = make_worker("w")
    if isinstance(choice, Choice) and choice.worker.id == "w":
        choice = Choice(worker, choice.reason, choice.rank)

    class Wrong:
        @hookimpl
        def choose_worker(self) -> Choice:
            return choice

    with pytest.raises(PluginFault) as raised:
        Registry([Loaded("wrong", Wrong())], ["wrong"]).choose("wrong", make_call(), (worker,))
    assert (raised.value.plugin, raised.value.hook) == ("wrong", "choose_worker")


def test_each_plugins_answer_is_told_by_itself_and_an_error_is_one():
    class Narrows:
        @hookimpl
        def eligible_workers(self, workers):
            return workers[1:]

    class Fails:
        @hookimpl
        def eligible_workers(self):
            raise ValueError("mine")

    class Passes:
        @hookimpl
        def eligible_workers(self) -> None: ...

    workers = (make_worker("v"), make_worker("w"))
    registry = Registry([Loaded("narrows", Narrows()), Loaded("fails", Fails()), Loaded("passes", Passes())])
    answers = dict(registry.each("eligible_workers", call=make_call(), workers=workers))
    assert (answers["narrows"], answers["passes"], str(answers["fails"])) == ([workers[1:]], [], "mine")


def test_a_hook_that_nobody_implements_is_no_call_at_all():
    registry = Registry([])
    assert registry.call("receive_call", call=make_call()) == []
    assert not registry.implements("receive_call")


def test_a_policy_that_is_no_plugin_is_refused_with_the_nearest():
    with pytest.raises(
        SettingsError, match=r"routing.policies: no loaded plugin 'round-robbin' chooses workers: did you mean 'round-robin'\?"
    ):
        Registry([choosing("round-robin", [])], ["round-robbin"])


def test_a_hook_that_does_not_exist_is_refused_with_plugin_and_distribution():
    class Wrong:
        @hookimpl
        def recieve_call(self, call: Call) -> None: ...

    with pytest.raises(SettingsError, match=r"plugin 'mine' of my-dist: unknown hook 'recieve_call'"):
        Registry([Loaded("mine", Wrong(), "my-dist")])


def test_an_argument_that_does_not_exist_is_refused_with_plugin_and_distribution():
    class Wrong:
        @hookimpl
        def receive_call(self, request) -> None: ...

    with pytest.raises(SettingsError, match=r"plugin 'mine' of this process: (?s:.*)request"):
        Registry([Loaded("mine", Wrong())])


def failing(error):
    class Fails:
        @hookimpl
        def receive_call(self, call: Call) -> None:
            self._help()

        def _help(self) -> None:
            raise error

    return Fails()


class Quiet:
    @hookimpl
    def receive_call(self, call: Call) -> None: ...


@pytest.mark.parametrize("culprit", ["a", "b", "c"])
def test_a_fault_in_a_helper_is_put_down_to_the_right_one_of_several_plugins(culprit):
    registry = Registry([Loaded(name, failing(ValueError()) if name == culprit else Quiet()) for name in ("a", "b", "c")])
    with pytest.raises(PluginFault) as raised:
        registry.call("receive_call", call=make_call())
    assert (raised.value.plugin, raised.value.hook) == (culprit, "receive_call")
    assert raised.value.message == f"plugin '{culprit}' failed in receive_call: ValueError"
    assert isinstance(raised.value.__cause__, ValueError)


def test_plugins_that_share_a_method_by_inheritance_are_told_apart():
    class Base:
        broken = False

        @hookimpl
        def receive_call(self, call: Call) -> None:
            if self.broken:
                raise ValueError

    first, second = Base(), Base()
    registry = Registry([Loaded("first", first), Loaded("second", second)])
    for plugin, name in ((first, "first"), (second, "second")):
        plugin.broken = True
        with pytest.raises(PluginFault) as raised:
            registry.call("receive_call", call=make_call())
        assert raised.value.plugin == name
        plugin.broken = False


def test_a_wrapper_is_not_blamed_for_what_passes_through_it():
    class Wrapper:
        @hookimpl(wrapper=True)
        def receive_call(self, call: Call):
            return (yield)

    registry = Registry([Loaded("wrapper", Wrapper()), Loaded("wrong", failing(ValueError()))])
    with pytest.raises(PluginFault) as raised:
        registry.call("receive_call", call=make_call())
    assert raised.value.plugin == "wrong"


def test_a_refusal_is_no_fault():
    refusal = BadRequest("no")
    with pytest.raises(BadRequest) as raised:
        Registry([Loaded("a", failing(refusal))]).call("receive_call", call=make_call())
    assert raised.value is refusal


def test_a_plugin_that_raises_system_exit_is_at_fault_and_ends_nothing():
    with pytest.raises(PluginFault, match="plugin 'a' failed in receive_call: SystemExit"):
        Registry([Loaded("a", failing(SystemExit(2)))]).call("receive_call", call=make_call())


async def test_a_plugin_that_raises_system_exit_after_a_wait_is_at_fault_and_ends_nothing():
    class Parses:
        @hookimpl
        async def prepare_call(self, call: Call) -> None:
            await trio.lowlevel.checkpoint()
            raise SystemExit(2)

    with pytest.raises(PluginFault, match="plugin 'a' failed in prepare_call: SystemExit"):
        await Registry([Loaded("a", Parses())]).prepare_call(make_call())


async def test_a_hook_that_is_cancelled_is_not_at_fault():
    class Waits:
        @hookimpl
        async def prepare_call(self, call: Call) -> None:
            await trio.sleep_forever()

    with trio.CancelScope() as scope:
        scope.cancel()
        await Registry([Loaded("a", Waits())]).prepare_call(make_call())
    assert scope.cancelled_caught


def test_an_interrupt_from_the_terminal_goes_through_a_hook():
    registry = Registry([Loaded("a", failing(KeyboardInterrupt()))])
    with pytest.raises(KeyboardInterrupt):
        registry.call("receive_call", call=make_call())


@pytest.mark.parametrize("error", [BadRequest("even a refusal"), SystemExit(2)])
def test_what_only_tells_is_told_to_each_plugin_whatever_another_does(error):
    told = []

    class Broken:
        @hookimpl
        def worker_joined(self, worker: Worker) -> None:
            raise error

    class Told:
        @hookimpl
        def worker_joined(self, worker: Worker) -> None:
            told.append(worker.id)

    Registry([Loaded("a", Broken()), Loaded("b", Told())]).tell("worker_joined", worker=make_worker("w"))
    assert told == ["w"]


def test_the_description_lists_plugins_and_the_order_of_each_hook_without_policies_that_are_not_enforced():
    described = Registry([choosing("b", []), noting("a", []), choosing("c", [])], ["b"]).describe()
    hooks = ["receive_call", "choose_worker", "call_settled", "worker_joined"]
    assert described["plugins"][0] == {"name": "b", "distribution": "", "version": "", "hooks": hooks}
    assert described["hooks"]["receive_call"] == ("b", "a")
    assert described["hooks"]["choose_worker"] == ("b",)
    assert described["hooks"]["worker_joined"] == ("b", "c")


def test_the_trace_prints_each_hook_call_without_tokens_or_keys(monkeypatch, capsys):
    monkeypatch.setenv("HEADRACE_TRACE_HOOKS", "1")

    class Tells:
        @hookimpl
        def receive_call(self, call: Call) -> None:
            if call.id == "bad":
                raise ValueError("prompt 700001")

        @hookimpl
        def eligible_workers(self, workers):
            return list(workers)

        @hookimpl
        def choose_worker(self, workers) -> Choice:
            return Choice(workers[0], "first")

        @hookimpl
        def lower_call(self, request) -> None: ...

    registry = Registry([Loaded("tells", Tells())], ["tells"])
    call = make_call(token_ids=[700001, 700002], headers={"authorization": "Bearer key-900001"}, cache_salt="salt-900001")
    worker = make_worker("w", lane := ScriptedLane())
    registry.call("receive_call", call=call)
    registry.call("eligible_workers", call=call, workers=(worker,))
    registry.call("choose_worker", call=call, workers=(worker,))
    registry.call("lower_call", call=call, worker=worker, request=lane.lower(call, 0))
    registry.call("lower_call", call=call, worker=worker, request={"token_ids": call.token_ids})
    with pytest.raises(PluginFault):
        registry.call("receive_call", call=make_call(id="bad"))
    printed = capsys.readouterr().err
    assert "hook receive_call(call=<Call r1>)" in printed
    assert "hook eligible_workers -> [[<Worker w>]]" in printed
    assert "hook choose_worker -> <Choice w: first>" in printed
    assert "hook receive_call -> ValueError" in printed
    assert "00001" not in printed


def test_a_result_that_is_a_list_of_numbers_is_not_printed(monkeypatch, capsys):
    monkeypatch.setenv("HEADRACE_TRACE_HOOKS", "1")

    class Odd:
        @hookimpl
        def receive_call(self, call: Call):
            return call.token_ids

    Registry([Loaded("odd", Odd())]).call("receive_call", call=make_call(token_ids=[700001]))
    assert "700001" not in capsys.readouterr().err
