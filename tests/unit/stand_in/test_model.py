"""The made-up distributions are distributions, and contexts are told apart by their tokens alone."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plugins.stand_in.engine.model import Context, Model

WEIGHTS = b"some weights"

contexts = st.lists(st.integers(0, 299), max_size=40)


@given(contexts, st.sampled_from([257, 300, 320]))
def test_ranks_and_tokens_are_one_to_one(tokens, size):
    distribution = Model(size).distribution(Context(tokens), WEIGHTS)
    ranked = [distribution.token(rank) for rank in range(1, size + 1)]
    assert sorted(ranked) == list(range(size))
    assert [distribution.rank(token) for token in ranked] == list(range(1, size + 1))


@given(contexts)
def test_probabilities_fall_with_the_rank_and_sum_to_one(tokens):
    distribution = Model(300).distribution(Context(tokens), WEIGHTS)
    logprobs = [distribution.logprob(rank) for rank in range(1, 301)]
    assert all(map(math.isfinite, logprobs))
    assert logprobs == sorted(logprobs, reverse=True)
    assert math.isclose(sum(map(math.exp, logprobs)), 1.0)


@given(contexts, contexts)
def test_a_context_does_not_depend_on_how_it_was_read(first, second):
    pushed = Context(first)
    for token in second:
        pushed.push(token)
    assert pushed.digest() == Context([*first, *second]).digest()


@pytest.mark.parametrize(("tokens", "weights"), [((1, 2, 4), WEIGHTS), ((2, 1, 3), WEIGHTS), ((1, 2), WEIGHTS), ((1, 2, 3), b"others")])
def test_another_context_or_other_weights_give_another_order(tokens, weights):
    model = Model(32000)
    base = model.distribution(Context((1, 2, 3)), WEIGHTS)
    other = model.distribution(Context(tokens), weights)
    assert [base.token(rank) for rank in range(1, 9)] != [other.token(rank) for rank in range(1, 9)]


def test_contexts_differ_in_how_sure_they_are():
    model = Model(32000)
    best = {round(model.distribution(Context([token]), WEIGHTS).logprob(1), 3) for token in range(100)}
    assert len(best) > 4
