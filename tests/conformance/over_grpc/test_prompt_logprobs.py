"""Log-probabilities of the prompt: parallel to its ids, in the message that tells of the prompt."""

import pytest

from core.wire import Status
from tests.conformance.over_grpc.client import PROMPT, refusal, request
from tests.conformance.over_grpc.coverage import exercises


@exercises("ResponseOptions.prompt_logprobs", "PromptInfo.logprobs", "PromptInfo.ranks", "PromptInfo.candidate_tokens")
async def test_every_token_but_the_first_has_a_logprob_and_a_rank(client):
    info = (await client.generate(request("response { prompt_logprobs: true }"))).prompt_info
    assert len(info.logprobs) == len(info.ranks) == len(info.candidate_tokens) == len(PROMPT)
    assert (info.logprobs[0], info.ranks[0]) == (0, 0)
    assert all(value < 0 for value in info.logprobs[1:])
    assert all(rank >= 1 for rank in info.ranks[1:])
    assert not any(row.tokens for row in info.candidate_tokens)


@exercises("ResponseOptions.prompt_candidates")
async def test_candidates_are_the_best_of_each_position(client):
    info = (await client.generate(request("response { prompt_logprobs: true prompt_candidates { top_n: 3 } }"))).prompt_info
    first, *others = info.candidate_tokens
    assert not first.tokens
    for token, rank, row in zip(PROMPT[1:], info.ranks[1:], others, strict=True):
        assert [candidate.rank for candidate in row.tokens] == [1, 2, 3]
        assert (rank <= 3) == (token in [candidate.id for candidate in row.tokens])


async def test_a_stream_tells_them_in_its_first_message(client):
    asked = request("response { prompt_logprobs: true prompt_candidates { top_n: 1 } }")
    first, *others = await client.stream(asked)
    assert first.prompt_info == (await client.generate(asked)).prompt_info
    assert len(others) == 4


async def test_a_prompt_of_one_token_has_one_entry_without_content(client):
    info = (await client.generate(request("response { prompt_logprobs: true prompt_candidates { top_n: 1 } }", prompt=[65]))).prompt_info
    assert (list(info.logprobs), list(info.ranks)) == ([0], [0])
    assert [len(row.tokens) for row in info.candidate_tokens] == [0]


async def test_the_prefix_cache_is_not_read(client):
    prompt = [*range(33, 233), 41]
    await client.generate(request(prompt=prompt))
    reply = await client.generate(request("response { prompt_logprobs: true }", prompt=prompt))
    assert reply.outputs.finish_info.num_cached_tokens == 0
    assert len(reply.prompt_info.logprobs) == len(prompt)


@pytest.mark.parametrize(("selected", "phrase"), [("token_ids { ids: 65 }", "token_ids"), ("top_n: 21", "20"), ("all: true", "20")])
async def test_what_cant_be_told_of_a_prompt_is_refused(client, selected, phrase):
    status, message = await refusal(client.generate(request(f"response {{ prompt_logprobs: true prompt_candidates {{ {selected} }} }}")))
    assert status is Status.INVALID_ARGUMENT
    assert phrase in message
