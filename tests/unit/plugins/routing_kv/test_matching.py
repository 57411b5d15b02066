"""One walk for all holders finds what a look at each of them would."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.routing_kv.hashing import Prompt
from plugins.routing_kv.index import SHARDS
from plugins.routing_kv.matching import closed_depths, counts, depths
from tests.unit.plugins.routing_kv.prompts import call_of

LENGTH = 300  # more than one stride
ALL = 0b1111
#: Who holds each block, by runs of equal ones, some of them long.
holdings = st.lists(st.tuples(st.integers(0, ALL), st.integers(1, 3) | st.integers(90, 140)), max_size=8).map(
    lambda runs: ([bits for bits, count in runs for _ in range(count)] + [0] * LENGTH)[:LENGTH]
)


def tables_of(prompt: Prompt, held: list[int]):
    table = [{} for _ in range(SHARDS)]
    for name, bits in zip(prompt.reach(LENGTH), held, strict=True):
        if bits:
            table[name % SHARDS][name] = bits
    return table


def nonzero(depths: dict[int, int]) -> dict[int, int]:
    return {bit: depth for bit, depth in depths.items() if depth}


@settings(deadline=None)
@given(holdings, holdings, st.integers(0, ALL))
def test_a_walk_is_a_look_at_each_holder(gpu, cpu, asked):
    prompt = Prompt(call_of(range(LENGTH)), 1, "")
    tables = [tables_of(prompt, gpu), tables_of(prompt, cpu)]
    union = [one | other for one, other in zip(gpu, cpu, strict=True)]
    fresh = Prompt(call_of(range(LENGTH)), 1, "")
    for held, looked_in in ((gpu, tables[:1]), (union, tables)):
        expected = {bit: next((i for i, bits in enumerate(held) if not bits & bit), LENGTH) for bit in (1, 2, 4, 8) if asked & bit}
        assert depths(fresh, looked_in, asked) == nonzero(expected)
    found = depths(fresh, tables, asked)
    in_gpu = counts(fresh, tables[:1], found)
    assert in_gpu == {bit: sum(bool(bits & bit) for bits in gpu[:depth]) for bit, depth in found.items()}


reaches = st.lists(st.integers(0, LENGTH), min_size=4, max_size=4)


@settings(deadline=None)
@given(reaches, reaches, st.integers(0, ALL))
def test_a_few_looks_find_as_much_where_nobody_has_gaps(young, old, asked):
    prompt = Prompt(call_of(range(LENGTH)), 1, "")
    held = [[sum(1 << i for i in range(4) if depth < reached[i]) for depth in range(LENGTH)] for reached in (young, old)]
    tables = [tables_of(prompt, one) for one in held]
    expected = {1 << i: max(young[i], old[i]) for i in range(4) if asked & 1 << i}
    assert closed_depths(Prompt(call_of(range(LENGTH)), 1, ""), tables, asked) == nonzero(expected)


@pytest.mark.parametrize("find", [depths, closed_depths])
def test_a_walk_goes_no_further_than_somebody_follows(find):
    prompt = Prompt(call_of(range(10_000)), 1, "")
    assert find(prompt, [[{} for _ in range(SHARDS)]], ALL) == find(prompt, [], ALL) == {}
    assert len(prompt.names) == 1
    assert find(Prompt(call_of([]), 1, ""), [[{} for _ in range(SHARDS)]], ALL) == {}
