"""Each hook's spec says all that there is to know, and has a test: a new one without documentation, example or test fails here."""

import ast
import inspect
import re
import textwrap

import pytest

from core.hookspecs import HOOKS, HookSpecs
from tests.unit.hooks import test_calls, test_proxy, test_workers

TESTS = {*vars(test_calls), *vars(test_proxy), *vars(test_workers)}


def doc_of(hook):
    return inspect.getdoc(getattr(HookSpecs, hook)) or ""


def arguments_of(hook):
    parameters = inspect.signature(getattr(HookSpecs, hook)).parameters
    return {name: written(parameter.annotation) for name, parameter in parameters.items() if name != "self"}


def written(annotation):
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation).removeprefix("typing.")


def example_of(hook):
    _, _, after = doc_of(hook).partition("\nExample")
    _, _, code = after.partition("\n\n")
    return ast.parse(textwrap.dedent(code))


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_says_when_it_runs_what_it_may_change_and_what_it_may_raise(hook):
    doc = doc_of(hook)
    assert re.search(r"^Runs ", doc, re.MULTILINE), "when does it run?"
    assert re.search(r"\b([Mm]ay change|[Mm]ay add|[Cc]hanges\s+n|Replaces)", doc), "what may it change?"
    assert re.search(r"^Raises: \S", doc, re.MULTILINE), "what may it raise?"


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_has_an_example_with_its_exact_signature(hook):
    [function] = [
        node for node in ast.walk(example_of(hook)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == hook
    ]
    assert [ast.unparse(decorator) for decorator in function.decorator_list] == ["hookimpl"]
    own, *arguments = function.args.args
    assert own.arg == "self"
    annotations = {argument.arg: argument.annotation and ast.unparse(argument.annotation) for argument in arguments}
    expected = arguments_of(hook)
    assert list(annotations) == list(expected)
    for name, annotation in expected.items():
        assert annotations[name] == annotation or annotation == "Any", name


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_names_each_of_its_arguments_in_its_documentation(hook):
    prose, _, _ = doc_of(hook).partition("\nExample")
    for name in arguments_of(hook):
        assert re.search(rf"\b{name}s?\b", prose), name


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_has_a_test_of_its_own(hook):
    assert any(name.startswith(f"test_hook_{hook}") for name in TESTS)


def test_no_test_is_for_a_hook_that_does_not_exist():
    for name in TESTS:
        if name.startswith("test_hook_"):
            assert name.removeprefix("test_hook_").startswith(HOOKS), name
