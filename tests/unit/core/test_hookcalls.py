"""Hooks called without pluggy: the same plugins, in the same order, with the same result."""

import asyncio
import itertools

import pluggy
import pytest

from core.hookcalls import direct, is_end

spec, impl = pluggy.HookspecMarker("test"), pluggy.HookimplMarker("test")


class Specs:
    @spec
    def ask(self, a, b): ...

    @spec(firstresult=True)
    def ask_first(self, a, b): ...


def plugin(name, answer, asked, **options):
    class Plugin:
        @impl(**options)
        def ask(self, b, a):
            asked.append((name, a, b))
            return answer

        @impl(**options)
        def ask_first(self, a):
            asked.append((name, a))
            return answer

    return Plugin()


def managing(*plugins):
    manager = pluggy.PluginManager("test")
    manager.add_hookspecs(Specs)
    for each in plugins:
        manager.register(each)
    return manager


@pytest.mark.parametrize("answers", list(itertools.product([None, 0, 7], repeat=3)))
@pytest.mark.parametrize("options", [{}, {"tryfirst": True}, {"trylast": True}])
@pytest.mark.parametrize("hook", ["ask", "ask_first"])
def test_the_result_and_the_order_are_those_of_pluggy(hook, options, answers):
    asked = []
    first, second, third = answers
    manager = managing(plugin("a", first, asked), plugin("b", second, asked, **options), plugin("c", third, asked))
    caller = getattr(manager.hook, hook)
    expected, order = caller(a=1, b=2), [*asked]
    asked.clear()
    assert direct(caller)(a=1, b=2) == expected
    assert asked == order


def test_a_hook_that_nobody_implements_has_no_answer():
    hook = managing().hook
    assert direct(hook.ask)(a=1, b=2) == []
    assert direct(hook.ask_first)(a=1, b=2) is None


def test_a_wrapper_is_left_to_pluggy():
    class Wrapper:
        @impl(wrapper=True)
        def ask(self):
            return [*(yield), "wrapped"]

    assert direct(managing(plugin("a", 7, []), Wrapper()).hook.ask)(a=1, b=2) == [7, "wrapped"]


def test_an_exception_comes_out_as_it_is():
    class Broken:
        @impl
        def ask(self):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        direct(managing(Broken()).hook.ask)(a=1, b=2)


@pytest.mark.parametrize("error", [SystemExit(2), asyncio.CancelledError(), BaseExceptionGroup("", [SystemExit(2), ValueError()])])
def test_what_a_plugin_has_done_is_no_end(error):
    assert not is_end(error)


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), GeneratorExit(), BaseExceptionGroup("", [ExceptionGroup("", [ValueError()]), KeyboardInterrupt()])]
)
def test_an_end_that_was_asked_for_is_one(error):
    assert is_end(error)
