"""Errors of decoding, in words."""

from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta, Struct

from core.errors import BadRequest
from core.refusals import refusing
from core.wording import nearest


class Inner(Struct, forbid_unknown_fields=True):
    mode: Literal["keep", "wait"] = "keep"


class Outer(Struct, forbid_unknown_fields=True):
    name: Annotated[str, Meta(pattern=r"\S")] = "x"
    inner: Inner | None = None
    many: list[Inner] = []
    in_row: tuple[Inner, ...] = ()
    by_name: dict[str, Inner] = {}
    by_mode: dict[Literal["keep", "wait"], int] = {}


NO_MODE = "'kep' is none; there are 'keep', 'wait'; did you mean 'keep'?"


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"nmae": "a"}, "nmae", "nmae: there is no such key here; did you mean 'name'?"),
        ({"inner": {"mod": "a"}}, "inner.mod", "inner.mod: there is no such key here; did you mean 'mode'?"),
        ({"inner": {"mode": "kep"}}, "inner.mode", "inner.mode: " + NO_MODE),
        ({"many": [{}, {"mode": "kep"}]}, "many[1].mode", "many[1].mode: " + NO_MODE),
        (
            {"by_name": {"a": {"mode": "kep"}}},
            "by_name[...].mode",
            "by_name[...].mode: " + NO_MODE,
        ),
        ({"in_row": [{"mode": "x"}]}, "in_row[0].mode", "in_row[0].mode: 'x' is none; there are 'keep', 'wait'"),
        ({"by_mode": {"kep": 1}}, "by_mode", "by_mode: a key: " + NO_MODE),
        ({"name": " "}, "name", "name: it must not be empty"),
        ({"name": 7}, "name", "name: Expected `str`, got `int`"),
        ([], None, "Expected `object`, got `array`"),
    ],
)
def test_an_error_says_where_what_and_what_is_allowed(body: Any, param: str | None, message: str):
    with pytest.raises(BadRequest) as refused, refusing("", Outer):
        msgspec.convert(body, Outer)
    assert (refused.value.param, refused.value.message) == (param, message)


def test_without_a_type_it_says_what_msgspec_says():
    with pytest.raises(BadRequest) as refused, refusing("there"):
        msgspec.convert({"inner": {"mode": "kep"}}, Outer)
    assert refused.value.message == "there.inner.mode: Invalid enum value 'kep'"


def test_the_hint_is_the_nearest_name_or_all_of_them():
    assert nearest("prot", ["port", "host"]) == "did you mean 'port'?"
    assert nearest("zzz", ["port", "host"]) == "known are host, port"
    assert nearest("zzz", []) == "there are none"
