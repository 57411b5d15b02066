"""The `kwargs` of an item: what vLLM takes passes, anything else is refused by name, and nothing makes the walk slow or deep."""

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import msgpack

from plugins.mm_features.kwargs import check_kwargs
from plugins.mm_features.msgpack import MAX_VALUES, Extension, Malformed, walk
from tests.unit.plugins.mm_features.media import kwargs, tensor

BATCHED = ["batched", {"keep_on_cpu": False}]


def field(data: Any, factory: Any = BATCHED) -> bytes:
    return msgpack.encode({"x": {"data": data, "field": factory}})


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else 1


# --- MessagePack -----------------------------------------------------------------------------------------------------------------

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=40),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=8), inner, max_size=20),
    max_leaves=50,
)


@given(values)
def test_what_another_implementation_packs_is_read_as_it_was(value):
    assert walk(msgpack.encode(value)) == value


@pytest.mark.parametrize("size", [0, 1, 2, 4, 8, 16, 17, 255, 256, 65_536])
def test_an_extension_is_its_type_and_its_size(size):
    assert walk(msgpack.encode(msgpack.Ext(-3, bytes(size)))) == Extension(-3, size)


@given(st.binary())
def test_any_bytes_are_read_or_refused(data):
    with contextlib.suppress(Malformed):
        walk(data)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "cut off"),
        (b"\x92\x01", "cut off"),
        (b"\xc7\xff\x03", "cut off"),
        (b"\x01\x01", "1 bytes follow its end"),
        (b"\xc1", "byte 0 is 0xc1"),
        (b"\xc4\x01x", "0xc4"),
        (b"\x81\x01\x01", "a key is no string"),
        (b"\x82\xa1a\x01\xa1a\x02", "stands twice"),
        (b"\xa1\xff", "UTF-8"),
        (msgpack.encode(nested(33)), "deeper than 32"),
        (b"\xdd\xff\xff\xff\xff" + b"\x01" * MAX_VALUES, f"more than {MAX_VALUES}"),
        (b"\xdf\xff\xff\xff\xff", "cut off"),
    ],
)
def test_what_is_no_value_is_refused_with_the_reason(data, reason):
    with pytest.raises(Malformed, match=reason):
        walk(data)


# --- one item --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        kwargs(),
        field(tensor("bfloat16", [2, 3], bytes(12))),
        field(tensor("bool", [], b"\x01")),
        field(tensor("uint8", [0, 5], b"")),
        field([tensor("int64", [1], bytes(8)), 3, 0.5, [7]]),
        field(3),
        field(0.5),
        field(nested(20)),
        field(1, ["shared", {"batch_size": 2, "keep_on_cpu": False}]),
        field(1, ["flat", {"slices": [[[0, 1, None]], [[1, 2, None]]], "dim": 0, "keep_on_cpu": True}]),
        field(1, ["batched", {}]),
    ],
)
def test_what_the_worker_takes_passes(data):
    check_kwargs(data)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (msgpack.encode([]), "no map with at least one field"),
        (msgpack.encode({}), "no map with at least one field"),
        (msgpack.encode({"": {"data": 1, "field": BATCHED}}), "has no name"),
        (msgpack.encode({"x": 1}), "field 'x': it is no map of `data` and `field`"),
        (msgpack.encode({"x": {"data": 1}}), "no map of `data` and `field`"),
        (msgpack.encode({"x": {"data": 1, "field": BATCHED, "more": 1}}), "no map of `data` and `field`"),
        (field(None), "no tensor, number"),
        (field(True), "no tensor, number"),
        (field("text"), "no tensor, number"),
        (field(tensor("float8", [1], b"x")), "dtype is 'float8'"),
        (field(tensor("float32", [2], bytes(7))), r"float32 and shape \[2\] has 7 bytes instead of 8"),
        (field(tensor("float32", [-1], b"")), "list of up to 16 lengths"),
        (field(tensor("float32", [1] * 17, bytes(4))), "list of up to 16 lengths"),
        (field(["float32", [1], 0]), "in line"),
        (field(["float32", [1], msgpack.Ext(4, bytes(4))]), "extension of type 3"),
        (field(1, "batched"), "none of batched, flat, shared"),
        (field(1, ["other", {}]), "none of batched, flat, shared"),
        (field(1, ["batched", {"dim": 0}]), "with their keywords"),
        (field(1, ["batched", {"keep_on_cpu": 1}]), "`keep_on_cpu` is no boolean"),
        (field(1, ["shared", {"batch_size": 0}]), "`batch_size` is no positive number"),
        (field(1, ["flat", {"slices": [[0, 1]]}]), "`slices` is no list"),
        (field(1, ["flat", {"slices": 3}]), "`slices` is no list"),
        (field(1, ["flat", {"slices": [], "dim": "0"}]), "`dim` is no number"),
    ],
)
def test_what_the_worker_would_refuse_is_refused_with_the_field(data, reason):
    with pytest.raises(Malformed, match=reason):
        check_kwargs(data)


@given(st.data())
def test_an_item_with_any_bytes_changed_passes_or_is_refused(data):
    item = bytearray(kwargs())
    for _ in range(data.draw(st.integers(1, 4))):
        item[data.draw(st.integers(0, len(item) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(Malformed):
        check_kwargs(bytes(item))
