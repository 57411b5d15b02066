"""The index is a naive model of it, whatever is stored, removed, cleared and swept in whatever order."""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from plugins.routing_kv.index import MEDIA, SHARDS, Holder, Index, Medium

HOLDERS = 3
holders = st.integers(0, HOLDERS - 1)
media = st.sampled_from(MEDIA)
#: Few of each, so that they meet; two hashes may stand for one name, as for an engine that has loaded an adapter from elsewhere.
hashes = st.integers(0, 9)


def name_of(engine_hash: int) -> int:
    return 1000 + engine_hash // 2


class IndexMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.index = Index(10_000)
        self.holders = [self.index.holder() for _ in range(HOLDERS)]
        self.model: list[Counter[tuple[Medium, int]]] = [Counter() for _ in range(HOLDERS)]

    @rule(number=holders, medium=media, engine_hash=hashes)
    def store(self, number: int, medium: Medium, engine_hash: int) -> None:
        self.holders[number].store(medium, engine_hash, name_of(engine_hash))
        self.model[number][medium, engine_hash] += 1

    @rule(number=holders, medium=media, engine_hash=hashes)
    def remove(self, number: int, medium: Medium, engine_hash: int) -> None:
        self.holders[number].remove(medium, engine_hash)
        self.model[number].subtract([(medium, engine_hash)])
        self.model[number] = +self.model[number]

    @rule(number=holders)
    def clear(self, number: int) -> None:
        self.holders[number].clear()
        self.model[number].clear()

    @rule(number=holders)
    def replace(self, number: int) -> None:
        closed = self.holders[number]
        closed.close()
        closed.store("GPU", 1, name_of(1))  # ignored
        closed.clear()
        self.holders[number] = self.index.holder()
        self.model[number].clear()

    @rule(most=st.integers(0, 5))
    def sweep(self, most: int) -> None:
        self.index.sweep(most)

    @invariant()
    def every_holder_has_what_it_should(self) -> None:
        for holder, model in zip(self.holders, self.model, strict=True):
            for medium in MEDIA:
                expected = {name_of(engine_hash) for place, engine_hash in +model if place == medium}
                assert {name for name in range(1000, 1005) if has(self.index, holder, medium, name)} == expected
                assert holder.blocks(medium) == len({engine_hash for place, engine_hash in +model if place == medium})
            for engine_hash in range(10):
                known = any(held == engine_hash for _, held in +model)
                assert holder.find(engine_hash) == (name_of(engine_hash) if known else None)

    @invariant()
    def nothing_is_left_when_all_is_swept(self) -> None:
        if not self.index.unswept:
            assert self.index.pairs == sum(len(+model) for model in self.model)
            for medium in MEDIA:
                names = {name_of(engine_hash) for model in self.model for place, engine_hash in +model if place == medium}
                assert self.index.blocks(medium) == len(names)


def has(index: Index, holder: Holder, medium: Medium, name: int) -> bool:
    return bool(index.holders[medium][name % SHARDS].get(name, 0) & holder.bit)


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_holders_never_share_a_bit_and_bits_are_used_again_once_swept():
    index = Index(100)
    holder, other = index.holder(), index.holder()
    holder.store("GPU", 1, 1)
    used = holder.bit
    holder.clear()
    assert len({used, holder.bit, other.bit}) == 3
    index.sweep(100)
    other.clear()
    assert other.bit == used


def test_what_is_to_be_swept_is_told():
    index, told = Index(100), []
    index.on_unswept = lambda: told.append(index.unswept)
    index.holder().clear()
    assert told == [True]


def test_a_full_index_takes_no_more_until_something_is_removed():
    index = Index(2)
    holder = index.holder()
    for engine_hash in (1, 2, 3):
        holder.store("GPU", engine_hash, engine_hash)
    assert (holder.blocks("GPU"), index.refused, holder.find(3)) == (2, 1, None)
    holder.remove("GPU", 3)
    holder.remove("GPU", 1)
    holder.store("GPU", 3, 3)
    assert (index.pairs, holder.find(3)) == (2, 3)
