"""One walk for all holders finds what a look at each of them would."""

from hypothesis import given
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


@given(holdings, holdings, st.integers(0, ALL))
def test_a_walk_is_a_look_at_each_holder(gpu, cpu, asked):
    prompt = Prompt(call_of(range(LENGTH)), 1)
    tables = [tables_of(prompt, gpu), tables_of(prompt, cpu)]
    union = [one | other for one, other in zip(gpu, cpu, strict=True)]
    fresh = Prompt(call_of(range(LENGTH)), 1)
    for held, looked_in in ((gpu, tables[:1]), (union, tables)):
        found = depths(fresh, looked_in, asked)
        expected = {bit: next((i for i, bits in enumerate(held) if not bits & bit), LENGTH) for bit in (1, 2, 4, 8) if asked & bit}
        assert {bit: depth for bit, depth in found.items() if depth} == {bit: depth for bit, depth in expected.items() if depth}
    found = depths(fresh, tables, asked)
    in_gpu = counts(fresh, tables[:1], found)
    assert in_gpu == {bit: sum(bool(bits & bit) for bits in gpu[:depth]) for bit, depth in found.items()}


@given(
    st.lists(st.integers(0, LENGTH), min_size=4, max_size=4), st.lists(st.integers(0, LENGTH), min_size=4, max_size=4), st.integers(0, ALL)
)
def test_a_few_looks_find_as_much_where_nobody_has_gaps(young, old, asked):
    prompt = Prompt(call_of(range(LENGTH)), 1)
    tables = [
        tables_of(prompt, [sum(1 << i for i in range(4) if depth < reached[i]) for depth in range(LENGTH)]) for reached in (young, old)
    ]
    fresh = Prompt(call_of(range(LENGTH)), 1)
    expected = {1 << i: max(young[i], old[i]) for i in range(4) if asked & 1 << i}
    found = closed_depths(fresh, tables, asked)
    assert {bit: depth for bit, depth in found.items() if depth} == {bit: depth for bit, depth in expected.items() if depth}
    assert closed_depths(fresh, [], asked) == {}


def test_a_walk_goes_no_further_than_somebody_follows():
    prompt = Prompt(call_of(range(10_000)), 1)
    assert not any(depths(prompt, [[{} for _ in range(SHARDS)]], ALL).values())
    assert len(prompt.names) < LENGTH
    assert not any(closed_depths(prompt, [[{} for _ in range(SHARDS)]], ALL).values())
    assert len(prompt.names) < LENGTH
    assert depths(prompt, [], ALL) == {}
