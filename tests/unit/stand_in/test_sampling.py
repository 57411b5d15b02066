"""Which token is chosen: over the wire, with the parameters that a client can send."""

import pytest

from tests.unit.stand_in.serving import body, over_asyncio, request, worker

SAMPLED = "temperature: 1.0 sampling {{ seed: {seed} }}"


@over_asyncio
async def test_greedy_tokens_are_the_same_every_time_and_on_both_wires():
    async with worker() as first, worker() as second:
        tokens = await first.tokens(request())
        assert len(tokens) == 4
        assert await first.tokens(request()) == tokens
        assert await second.tokens(request()) == tokens
        assert (await second.generate_http(body()))["choices"][0]["token_ids"] == tokens


@over_asyncio
async def test_a_prompt_that_contains_an_answer_goes_on_as_the_answer_would_have():
    async with worker() as stand_in:
        whole = await stand_in.tokens(request(tokens=8))
        rest = await stand_in.tokens(request(prompt=[1, 2, 3, *whole[:5]], tokens=3))
        assert rest == whole[5:]


@pytest.mark.parametrize(
    "same", ['kv { cache_salt: "a" }', 'request_id: "x"', "priority: 7", "kv { bypass_prefix_cache: true }", "temperature: 1e-6"]
)
@over_asyncio
async def test_greedy_tokens_do_not_depend_on(same):
    async with worker() as stand_in:
        assert await stand_in.tokens(request(same)) == await stand_in.tokens(request())


@over_asyncio
async def test_streaming_gives_the_tokens_of_the_unary_call():
    async with worker(stream_interval=3) as stand_in:
        messages = await stand_in.messages(request(tokens=10))
        streamed = [token for message in messages for token in message.outputs.token_ids]
        assert streamed == await stand_in.tokens(request(tokens=10))
        assert [message.outputs.num_tokens for message in messages] == [0, 1, 3, 3, 3]


@over_asyncio
async def test_a_seed_decides_sampled_tokens_and_another_seed_others():
    async with worker() as stand_in:
        one, again, two, zero = [await stand_in.tokens(request(SAMPLED.format(seed=seed), tokens=32)) for seed in (1, 1, 2, 0)]
        assert one == again
        assert len({tuple(one), tuple(two), tuple(zero)}) == 3


@pytest.mark.parametrize("text", ["temperature: 2.0", "temperature: 2.0 sampling { seed: -1 }"])
@over_asyncio
async def test_without_a_seed_sampling_is_random(text):
    async with worker() as stand_in:
        assert await stand_in.tokens(request(text, tokens=64)) != await stand_in.tokens(request(text, tokens=64))


@pytest.mark.parametrize("narrow", ["top_k: 1", "top_p: 1e-9", "min_p: 1.0"])
@over_asyncio
async def test_sampling_from_one_token_is_greedy(narrow):
    async with worker() as stand_in:
        sampled = await stand_in.tokens(request(f"temperature: 1.0 sampling {{ seed: 5 {narrow} }}", tokens=16))
        assert sampled == await stand_in.tokens(request(tokens=16))


@over_asyncio
async def test_top_k_keeps_ranks_within_k():
    async with worker() as stand_in:
        text = "temperature: 2.0 sampling { seed: 5 top_k: 3 } response { output_logprobs: true }"
        ranks = (await stand_in.generate(request(text, tokens=64))).outputs.ranks
        assert set(ranks) == {1, 2, 3}


@over_asyncio
async def test_a_bias_can_force_a_token():
    async with worker() as stand_in:
        assert await stand_in.tokens(request("decoding { logit_bias { key: 77 value: 1000 } }")) == [77] * 4


@over_asyncio
async def test_only_allowed_tokens_are_chosen():
    async with worker() as stand_in:
        tokens = await stand_in.tokens(request("decoding { allowed_token_ids: [5, 6] }", tokens=32))
        assert set(tokens) == {5, 6}


@over_asyncio
async def test_a_bad_word_is_not_completed():
    async with worker() as stand_in:
        a, b, *_ = await stand_in.tokens(request())
        avoided = await stand_in.tokens(request(f"decoding {{ bad_words_token_ids {{ ids: [{a}, {b}] }} }}"))
        assert avoided[0] == a
        assert avoided[1] != b
        banned = await stand_in.tokens(request(f"decoding {{ bad_words_token_ids {{ ids: [{a}] }} }}"))
        assert a not in banned


@over_asyncio
async def test_min_tokens_keeps_the_end_away():
    async with worker() as stand_in:
        force_the_end = "decoding { logit_bias { key: 256 value: 100 } }"
        ended = await stand_in.generate(request(force_the_end, tokens=8))
        assert list(ended.outputs.token_ids) == [256]
        later = await stand_in.generate(request(f"{force_the_end} stopping {{ min_new_tokens: 3 }}", tokens=8))
        assert len(later.outputs.token_ids) == 4
        assert later.outputs.token_ids[3] == 256
