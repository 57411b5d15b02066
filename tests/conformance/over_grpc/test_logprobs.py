"""Log-probabilities of the output: one entry per token, parallel to its ids."""

import math

from core.wire import Status
from tests.conformance.over_grpc.client import refusal, request
from tests.conformance.over_grpc.coverage import exercises

TEMPERED = "temperature: 1.0 sampling { seed: 7 }"


@exercises("ResponseOptions.output_logprobs", "SequenceOutput.logprobs", "SequenceOutput.ranks", "SequenceOutput.candidate_tokens")
async def test_without_candidates_each_token_has_its_logprob_and_an_empty_row(client):
    outputs = (await client.generate(request("response { output_logprobs: true }"))).outputs
    assert len(outputs.logprobs) == len(outputs.ranks) == len(outputs.candidate_tokens) == 4
    assert all(value <= 0 for value in outputs.logprobs)
    assert all(rank == 1 for rank in outputs.ranks), "greedy"
    assert not any(row.tokens for row in outputs.candidate_tokens)


@exercises("ResponseOptions.output_candidates", "CandidateTokens.top_n", "CandidateTokenInfo.tokens")
@exercises("CandidateTokenInfo.TokenInfo.id", "CandidateTokenInfo.TokenInfo.logprob", "CandidateTokenInfo.TokenInfo.rank")
async def test_candidates_are_the_best_ones_with_the_sampled_token_repeated(client):
    asked = f"{TEMPERED} response {{ output_logprobs: true output_candidates {{ top_n: 5 }} }}"
    outputs = (await client.generate(request(asked, tokens=16))).outputs
    rows = zip(outputs.token_ids, outputs.logprobs, outputs.ranks, outputs.candidate_tokens, strict=True)
    for token, value, rank, row in rows:
        assert [candidate.rank for candidate in row.tokens] == [1, 2, 3, 4, 5]
        assert sorted((candidate.logprob for candidate in row.tokens), reverse=True) == [candidate.logprob for candidate in row.tokens]
        if rank <= 5:
            assert (row.tokens[rank - 1].id, row.tokens[rank - 1].logprob) == (token, value)
        else:
            assert token not in [candidate.id for candidate in row.tokens]


@exercises("CandidateTokens.token_ids")
async def test_selected_candidates_keep_their_order_and_are_ranked_by_it(client):
    asked = "response { output_logprobs: true output_candidates { token_ids { ids: 70 ids: 66 ids: 70 } } }"
    outputs = (await client.generate(request(asked))).outputs
    for row in outputs.candidate_tokens:
        assert [(candidate.id, candidate.rank) for candidate in row.tokens] == [(70, 1), (66, 2), (70, 3)]
        assert row.tokens[0].logprob == row.tokens[2].logprob


async def test_candidates_without_logprobs_give_nothing(client):
    outputs = (await client.generate(request("response { output_candidates { top_n: 2 } }"))).outputs
    assert (len(outputs.logprobs), len(outputs.ranks), len(outputs.candidate_tokens)) == (0, 0, 0)


async def test_more_candidates_than_the_server_allows_are_refused(client):
    status, message = await refusal(client.generate(request("response { output_logprobs: true output_candidates { top_n: 21 } }")))
    assert status is Status.INVALID_ARGUMENT
    assert message == "requested logprobs of 21, which is greater than max allowed: 20"


@exercises("CandidateTokens.all")
async def test_all_candidates_are_more_than_the_server_allows(client):
    status, message = await refusal(client.generate(request("response { output_logprobs: true output_candidates { all: true } }")))
    assert status is Status.INVALID_ARGUMENT
    assert message == f"requested logprobs of {client.worker.vocab_size}, which is greater than max allowed: 20"


async def test_a_stream_has_the_logprobs_of_each_messages_tokens(client):
    asked = "response { output_logprobs: true output_candidates { top_n: 1 } }"
    for message in (await client.stream(request(asked)))[1:]:
        assert len(message.outputs.logprobs) == len(message.outputs.candidate_tokens) == message.outputs.num_tokens == 1


async def test_what_is_no_number_stays_so_and_has_no_rank(scripted):
    outputs = (await scripted.generate(request("response { output_logprobs: true }", prompt=[7]))).outputs
    assert all(math.isnan(value) for value in outputs.logprobs)
    assert list(outputs.ranks) == [0] * 4
