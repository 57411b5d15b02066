"""Statuses of refused calls on gRPC, and that a refused call is answered with nothing else."""

import math

import pytest
from grpclib.const import Status

from core.wire.generated import inference_pb2 as pb
from tests.unit.stand_in.serving import over_asyncio, refusal, request, worker

INVALID = [
    "sampling { num_sequences: 2 }",
    "temperature: -0.1",
    "temperature: 2.1",
    "temperature: nan",
    "temperature: inf",
    "sampling { top_p: 0 }",
    "sampling { top_p: 1.1 }",
    "sampling { min_p: -0.1 }",
    "sampling { min_p: 1.1 }",
    "decoding { presence_penalty: 2.1 }",
    "decoding { frequency_penalty: -2.1 }",
    "decoding { frequency_penalty: nan }",
    "decoding { repetition_penalty: -1 }",
    "decoding { repetition_penalty: inf }",
    *(f'kv {{ cache_salt: "{salt}" }}' for salt in ("x" * 129, "a@b", "a/b", "a\\\\b", "a\\000b")),
    "token_ids { ids: 300 }",
    "stopping { stop_token_ids: 300 }",
    "decoding { allowed_token_ids: 300 }",
    "decoding { logit_bias { key: 300 value: 1 } }",
    "decoding { bad_words_token_ids { } }",
    "decoding { bad_words_token_ids { ids: 300 } }",
    "decoding { " + "bad_words_token_ids { ids: 1 } " * 129 + "}",
    f"decoding {{ bad_words_token_ids {{ ids: {[1] * 1025} }} }}",
    f"token_ids {{ ids: {[1] * 2045} }}",
    "truncate_prompt_tokens: 2049",
    "stopping { thinking_token_budget: -2 }",
    'stopping { stop_strings: "" }',
    "stopping { min_new_tokens: 5 }",
    'decoding { json: "{" }',
    'decoding { grammar: "" }',
    'decoding { structural_tag: "" }',
    "decoding { choice { } }",
    'decoding { regex: "a\\000" }',
    "response { output_logprobs: true output_candidates { top_n: 21 } }",
    "response { output_logprobs: true output_candidates { all: true } }",
    "response { output_logprobs: true output_candidates { token_ids { ids: 300 } } }",
    f"response {{ output_logprobs: true output_candidates {{ token_ids {{ ids: {[1] * 129} }} }} }}",
    "response { prompt_logprobs: true prompt_candidates { top_n: 21 } }",
    "response { prompt_logprobs: true prompt_candidates { token_ids { ids: 1 } } }",
    "media { modality: IMAGE }",
    'media { modality: IMAGE url: "http://example/a.png" }',
    'media { modality: IMAGE features { identifier: "a" length: 1 } }',
    'media { modality: IMAGE features { identifier: "a" length: 1 kwargs: "x" } }',
]

ACCEPTED = [
    "",
    'model: "stand-in"',
    'model: "alias"',
    "temperature: 2.0",
    "sampling { num_sequences: 1 top_k: 4294967295 }",
    "decoding { repetition_penalty: 0.5 }",
    'kv { cache_salt: "' + "é" * 128 + '" }',
    "token_ids { ids: 299 }",
    f"token_ids {{ ids: {[1] * 2044} }}",
    "truncate_prompt_tokens: 2048",
    "stopping { thinking_token_budget: -1 }",
    "decoding { json_object: false }",
    'decoding { regex: "" }',
    "response { output_candidates { top_n: 21 } }",
    "response { output_logprobs: true output_candidates { } }",
    "response { output_logprobs: true output_candidates { all: false } }",
    "response { output_logprobs: true output_candidates { token_ids { } } }",
    "response { output_logprobs: true output_candidates { top_n: 20 } }",
]

OPTIONS = {"vocab_size": 300, "max_model_len": 2048, "served_model_names": ("stand-in", "alias")}


@over_asyncio
async def test_wrong_values_are_invalid_arguments():
    async with worker(**OPTIONS) as stand_in:
        for text in INVALID:
            status, message = await refusal(stand_in.generate(request(text)))
            assert (status, bool(message)) == (Status.INVALID_ARGUMENT, True), text


@pytest.mark.parametrize("prompt", [{}, {"token_ids": pb.TokenIds()}, {"text": ""}], ids=["none", "no token", "no text"])
@over_asyncio
async def test_a_prompt_without_a_token_is_an_invalid_argument(prompt):
    async with worker() as stand_in:
        status, _ = await refusal(stand_in.generate(pb.GenerateRequest(**prompt)))
        assert status is Status.INVALID_ARGUMENT


@over_asyncio
async def test_values_at_the_edge_are_accepted():
    async with worker(**OPTIONS) as stand_in:
        for text in ACCEPTED:
            response = await stand_in.generate(request(text, tokens=2))
            assert response.outputs.finish_info.num_output_tokens in {1, 2}, text


@over_asyncio
async def test_an_unknown_model_is_not_found_and_so_is_an_adapter_in_its_place():
    async with worker() as stand_in:
        await stand_in.post("/v1/load_lora_adapter", {"lora_name": "tuned", "lora_path": "hub/tuned"})
        for name in ("other", "tuned"):
            assert (await refusal(stand_in.generate(request(f'model: "{name}"'))))[0] is Status.NOT_FOUND


@pytest.mark.parametrize("rank", ["x", "-1", str(2**32)])
@over_asyncio
async def test_what_is_no_rank_is_refused_before_everything(rank):
    async with worker() as stand_in:
        status, message = await refusal(stand_in.generate(request('model: "nobody"'), x_data_parallel_rank=rank))
        assert status is Status.INVALID_ARGUMENT
        assert "unsigned 32-bit" in message


@over_asyncio
async def test_a_rank_that_is_not_connected_is_refused_after_everything():
    async with worker() as stand_in:
        assert (await refusal(stand_in.generate(request('model: "nobody"'), x_data_parallel_rank="1")))[0] is Status.NOT_FOUND
        status, message = await refusal(stand_in.generate(request(), x_data_parallel_rank="1"))
        assert status is Status.INVALID_ARGUMENT
        assert "[0]" in message


@over_asyncio
async def test_the_connected_rank_is_accepted():
    async with worker() as stand_in:
        assert (await stand_in.generate(request(), x_data_parallel_rank=" 0 ")).outputs.num_tokens == 4


@over_asyncio
async def test_a_refused_stream_has_no_message():
    async with worker() as stand_in:
        status, _ = await refusal(stand_in.messages(request("temperature: 3")))
        assert status is Status.INVALID_ARGUMENT


@over_asyncio
async def test_without_a_limit_all_candidates_can_be_had():
    async with worker(max_logprobs=-1, vocab_size=300) as stand_in:
        response = await stand_in.generate(request("response { output_logprobs: true output_candidates { all: true } }", tokens=1))
        tokens = response.outputs.candidate_tokens[0].tokens
        assert len(tokens) == 300
        assert math.isclose(sum(math.exp(token.logprob) for token in tokens), 1.0, rel_tol=1e-4)
