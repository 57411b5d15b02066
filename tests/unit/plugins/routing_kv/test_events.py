"""KV events in both of their forms, whatever else stands in them."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.routing_kv.events import Batch, Cleared, Event, Removed, Stored, decode, key_of

hashes = st.integers(0, 2**64 - 1) | st.binary(min_size=32, max_size=32)
texts = st.text(max_size=5)
keys = st.none() | st.lists(texts | st.tuples(texts, st.integers(-100, 100)).map(list), max_size=3)
media = st.none() | st.sampled_from(["GPU", "CPU", "STORAGE"])
groups = st.none() | st.integers(0, 3)
localities = st.none() | st.sampled_from(["LOCAL", "REMOTE"])
events = st.one_of(
    st.builds(
        Stored,
        block_hashes=st.lists(hashes, max_size=3),
        token_ids=st.lists(st.integers(0, 2**32 - 1), max_size=6),
        block_size=st.integers(1, 64),
        parent_block_hash=st.none() | hashes,
        medium=media,
        lora_name=st.none() | texts,
        extra_keys=st.none() | st.lists(keys, max_size=3),
        group_idx=groups,
        kv_cache_spec_kind=st.none() | texts,
        locality=localities,
    ),
    st.builds(Removed, block_hashes=st.lists(hashes, max_size=3), medium=media, group_idx=groups, locality=localities),
    st.just(Cleared()),
)
#: Members of the real ones that nobody uses here, and such as may come.
STRANGE = {"lora_id": 3, "session_id": "s", "kv_cache_spec_sliding_window": None, "ownership": "tier-2", "more": {"a": [1]}}


def as_map(event: Event, **more: Any) -> dict[str, Any]:
    return {**msgspec.to_builtins(event, builtin_types=(bytes,)), **more}


def as_array(event: Event, *more: Any) -> list[Any]:
    match event:
        case Stored():
            first = [event.block_hashes, event.parent_block_hash, event.token_ids, event.block_size, 3, event.medium, event.lora_name]
            return ["BlockStored", *first, event.extra_keys, event.group_idx, event.kv_cache_spec_kind, None, event.locality, *more]
        case Removed():
            return ["BlockRemoved", event.block_hashes, event.medium, event.group_idx, event.locality, *more]
        case Cleared():
            return ["AllBlocksCleared", *more]


def payload(*encoded: Any) -> bytes:
    return msgspec.msgpack.encode([1.5, list(encoded), 0, "more"])


@settings(deadline=None)
@given(st.lists(events, max_size=4), st.data())
def test_every_event_is_read_in_either_form_whatever_stands_beside_it(sent, data):
    forms = st.sampled_from([lambda e: as_map(e, **STRANGE), as_map, as_array, lambda e: as_array(e, "more", {"a": 1})])
    assert decode(payload(*(data.draw(forms)(event) for event in sent))) == Batch(sent)


@pytest.mark.parametrize(
    "wrong",
    [
        {"type": "BlockMoved", "block_hashes": [1]},
        {"type": "BlockRemoved"},
        {"type": "BlockRemoved", "block_hashes": ["1"]},
        {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": ["a"], "block_size": 1},
        {"block_hashes": [1]},
        ["BlockStored", [1], None, [5]],
        ["BlockMoved"],
        [],
        7,
        None,
    ],
)
def test_an_event_that_cant_be_read_is_counted_and_costs_no_other(wrong):
    removed = Removed([7], "GPU")
    assert decode(payload(as_map(removed), wrong, as_array(removed))) == Batch([removed, removed], malformed=1)


@settings(deadline=None)
@given(st.binary(max_size=20))
def test_bytes_that_are_no_batch_are_counted(noise):
    batch = decode(noise)
    assert batch.malformed or not batch.events


@settings(deadline=None)
@given(st.recursive(st.none() | st.integers(-5, 5) | texts, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner)))
def test_nothing_that_is_messagepack_raises(value):
    decode(msgspec.msgpack.encode(value))
    decode(payload(value))


@pytest.mark.parametrize("before", [b"", b"\x93\x01", b"\x93\x01\x91", b"\x93\x01\x91\x95\xabBlockStored\x90\xc0\x90\x10"])
def test_endless_nesting_is_counted(before):
    assert decode(before + b"\x91" * 200_000).malformed == 1


def test_a_hash_has_one_number_whatever_its_form():
    digest = bytes(range(24)) + (2**63 + 5).to_bytes(8, "big")
    assert key_of(digest) == key_of(2**63 + 5) == key_of(2**63 + 5 - 2**64)
