"""What engines tell is found again by calls that would hit it, and by no others."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from plugins.routing_kv.events import Cleared, Removed, Stored
from plugins.routing_kv.feed import Feed
from plugins.routing_kv.hashing import Prompt
from plugins.routing_kv.index import Index
from plugins.routing_kv.matching import depths
from tests.unit.plugins.routing_kv.prompts import BLOCK, call_of, stored

TOKENS = list(range(50, 50 + 6 * BLOCK))
#: Three items: in one block, over two, over a whole one.
MEDIA = [("cat", 1, 2), ("dog", 6, 4), ("owl", 11, 6)]


class Engine:
    """One engine's events, and what calls find of it."""

    def __init__(self) -> None:
        self.index = Index(1_000)
        self.feed = Feed(self.index.holder())

    def tell(self, *events) -> "Engine":
        for event in events:
            self.feed.apply(event)
        return self

    def found(self, call, *media) -> int:
        """Blocks of the call that it has, in these media."""
        bit = self.feed.holder.bit
        tables = [self.index.holders[medium] for medium in media or ("GPU",)]
        return depths(Prompt(call, BLOCK, call.identity.namespace), tables, bit).get(bit, 0)


def test_a_prompt_is_found_up_to_where_it_differs():
    engine = Engine().tell(stored(TOKENS))
    assert engine.found(call_of(TOKENS)) == 6
    assert engine.found(call_of([*TOKENS, 1, 2, 3])) == 6
    assert engine.found(call_of(TOKENS[: 2 * BLOCK + 1])) == 2
    assert engine.found(call_of([*TOKENS[:13], 1, *TOKENS[14:]])) == 3
    assert engine.found(call_of(TOKENS[BLOCK:])) == 0
    assert engine.found(call_of([])) == 0


IDENTITIES = [
    {},
    {"salt": "7"},
    {"salt": "8"},
    {"adapter": "7"},
    {"adapter": "math"},
    {"salt": "math", "adapter": "math"},
    {"media": MEDIA},
]


@pytest.mark.parametrize("identity", IDENTITIES)
def test_a_prompt_is_found_under_its_own_salt_adapter_and_media_only(identity):
    engine = Engine().tell(stored(TOKENS, **identity))
    for other in IDENTITIES:
        assert engine.found(call_of(TOKENS, **other)) == (6 if other == identity else 0)


@pytest.mark.parametrize("identity", IDENTITIES)
def test_blocks_that_continue_a_prompt_inherit_what_only_its_first_block_has(identity):
    first = stored(TOKENS[: 2 * BLOCK], **identity)
    rest = stored(TOKENS[2 * BLOCK :], first_hash=200, parent=101, offset=2 * BLOCK, **identity)
    engine = Engine().tell(first, rest)
    for other in IDENTITIES:
        assert engine.found(call_of(TOKENS, **other)) == (6 if other == identity else 0)


def test_equal_placeholders_with_other_media_are_other_blocks_from_the_first_that_differs():
    engine = Engine().tell(stored(TOKENS, media=MEDIA))
    cat, dog, owl = MEDIA
    assert engine.found(call_of(TOKENS, media=[cat, ("fox", 6, 4), owl])) == 1
    assert engine.found(call_of(TOKENS, media=[cat, dog, ("fox", 11, 6)])) == 2
    assert engine.found(call_of(TOKENS, media=[cat, dog, ("owl", 12, 5)])) == 2
    assert engine.found(call_of(TOKENS, media=[("cat", 2, 2), dog, owl])) == 0
    assert engine.found(call_of(TOKENS[:9], media=[cat, dog])) == 2


def test_media_that_are_bound_to_the_salt_are_found_under_the_names_that_the_engine_got():
    engine = Engine().tell(stored(TOKENS, salt="7", media=[(f"7/{name}", offset, length) for name, offset, length in MEDIA]))
    found: list[int] = []
    for salt in ("7", "8"):
        call = call_of(TOKENS, salt=salt, media=MEDIA)
        call.identity = replace(call.identity, media_by_salt=True)
        found.append(engine.found(call))
    assert found == [6, 0]


def test_media_whose_places_only_the_worker_will_know_are_found_nowhere():
    engine = Engine().tell(stored(TOKENS))
    call = call_of(TOKENS, media=MEDIA)
    call.identity = type(call.identity)(media=call.identity.media)
    assert engine.found(call) == 0


def test_blocks_made_of_embeddings_are_found_by_nobody():
    engine = Engine().tell(stored(TOKENS[:BLOCK], extra_keys=[[b"digest"]]), stored(TOKENS[:BLOCK], extra_keys=[["7", "digest"]]))
    assert engine.found(call_of(TOKENS)) == engine.found(call_of(TOKENS, salt="7")) == 0


def test_a_block_counts_until_its_last_copy_is_removed():
    engine = Engine().tell(stored(TOKENS), stored(TOKENS[:BLOCK]), Removed([100], "GPU"))
    assert engine.found(call_of(TOKENS)) == 6
    engine.tell(Removed([102], "GPU"), Removed([999], "GPU"))
    assert engine.found(call_of(TOKENS)) == 2
    engine.tell(Removed([100], "GPU"))
    assert engine.found(call_of(TOKENS)) == 0


def test_a_cleared_engine_has_nothing_and_is_known_wholly():
    engine = Engine().tell(stored(TOKENS))
    assert not engine.feed.whole
    engine.tell(Cleared())
    assert engine.feed.whole
    assert engine.found(call_of(TOKENS)) == 0
    assert engine.tell(stored(TOKENS)).found(call_of(TOKENS)) == 6


def test_media_tiers_are_kept_apart_and_a_copy_needs_no_tokens():
    engine = Engine().tell(stored(TOKENS), Stored([100, 101], [], 0, medium="CPU"), Stored([102], [], 0, medium="STORAGE"))
    assert [engine.found(call_of(TOKENS), medium) for medium in ("GPU", "CPU", "STORAGE")] == [6, 2, 0]
    engine.tell(Removed([100, 101, 102, 103, 104, 105], "GPU"))
    assert [engine.found(call_of(TOKENS), medium) for medium in ("GPU", "CPU")] == [0, 2]
    assert engine.found(call_of(TOKENS), "CPU", "STORAGE") == 3


def test_a_medium_that_nobody_knows_and_another_machines_blocks_are_left_out():
    engine = Engine().tell(stored(TOKENS, medium="TAPE"), stored(TOKENS, locality="REMOTE"))
    assert engine.found(call_of(TOKENS)) == 0
    assert engine.tell(stored(TOKENS, medium=None, locality="LOCAL")).found(call_of(TOKENS)) == 6


def test_of_several_groups_the_first_that_attends_to_whole_prompts_counts():
    windowed = Stored([100], TOKENS, BLOCK, medium="GPU", group_idx=0, kv_cache_spec_kind="sliding_window")
    engine = Engine().tell(windowed, *(stored(TOKENS, group_idx=group, kv_cache_spec_kind="full_attention") for group in (1, 2)))
    assert engine.found(call_of(TOKENS)) == 6
    engine.tell(Removed([100], "GPU", 0), Removed([100], "GPU", 2))
    assert engine.found(call_of(TOKENS)) == 6
    engine.tell(Removed([100], "GPU", 1))
    assert engine.found(call_of(TOKENS)) == 0
    assert engine.feed.malformed == 0


def test_a_block_whose_parent_is_not_known_is_counted_and_left_out():
    engine = Engine().tell(stored(TOKENS, parent=99))
    assert (engine.found(call_of(TOKENS)), engine.feed.orphans) == (0, 6)


@pytest.mark.parametrize(
    "wrong",
    [
        {"token_ids": TOKENS[:-1]},
        {"block_size": 0},
        {"block_hashes": [1, 2, 3, 4, 5]},
        {"extra_keys": [None]},
        {"token_ids": [*TOKENS[:-1], 2**32]},
        {"token_ids": [*TOKENS[:-1], -1]},
    ],
)
def test_an_event_that_contradicts_itself_is_counted_and_left_out(wrong):
    fields = {"block_hashes": [1, 2, 3, 4, 5, 6], "token_ids": TOKENS, "block_size": BLOCK} | wrong
    engine = Engine().tell(Stored(**fields))
    assert (engine.found(call_of(TOKENS)), engine.feed.malformed) == (0, 1)


@settings(deadline=None)
@given(st.lists(st.integers(0, 2), min_size=BLOCK, max_size=30), st.lists(st.integers(0, 2), max_size=30), st.integers(1, 8))
def test_what_is_found_is_the_common_prefix_in_whole_blocks(told, asked, cut):
    """Whether the engine tells it at once or by pieces."""
    engine = Engine()
    cut = cut * BLOCK
    whole = len(told) // BLOCK * BLOCK
    engine.tell(stored(told[:cut]))
    if whole > cut:
        engine.tell(stored(told[cut:whole], first_hash=100 + cut // BLOCK, parent=100 + cut // BLOCK - 1, offset=cut))
    same = next((i for i, (one, other) in enumerate(zip(told[:whole], asked, strict=False)) if one != other), min(whole, len(asked)))
    assert engine.found(call_of(asked)) == same // BLOCK
