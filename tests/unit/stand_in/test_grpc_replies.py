"""What a reply on gRPC is made of: prompt_info, outputs, finish_info, logprobs, text."""

import math
from typing import Any

import pytest

from core.wire.generated import inference_pb2 as pb
from tests.unit.stand_in.serving import over_asyncio, request, worker

FORCE = "decoding {{ logit_bias {{ key: {token} value: 100 }} }} "


@over_asyncio
async def test_a_unary_reply_is_one_message_with_prompt_info_and_finish_info():
    async with worker() as stand_in:
        response = await stand_in.generate(request("response { prompt_token_ids: true }"))
        assert response.prompt_info.num_prompt_tokens == 3
        assert list(response.prompt_info.token_ids) == [1, 2, 3]
        assert (response.outputs.index, response.outputs.num_tokens, len(response.outputs.token_ids)) == (0, 4, 4)
        finish = response.outputs.finish_info
        assert (finish.num_output_tokens, finish.finish_reason) == (4, pb.FinishInfo.LENGTH)
        assert finish.WhichOneof("stop_reason") is None
        assert finish.HasField("num_cached_tokens")
        assert not response.outputs.logprobs


@over_asyncio
async def test_a_stream_begins_with_prompt_info_alone_and_ends_with_a_token_and_finish_info():
    async with worker() as stand_in:
        first, *rest = await stand_in.messages(request(tokens=3))
        assert first.HasField("prompt_info")
        assert not first.HasField("outputs")
        assert [message.HasField("prompt_info") for message in rest] == [False] * 3
        assert [message.outputs.num_tokens for message in rest] == [1, 1, 1]
        assert [message.outputs.HasField("finish_info") for message in rest] == [False, False, True]
        assert rest[-1].outputs.finish_info.num_output_tokens == 3


@over_asyncio
async def test_token_ids_and_text_come_only_when_asked_for():
    async with worker() as stand_in:
        message = request("response { output_text: false }")
        message.response.output_token_ids = False
        outputs = (await stand_in.generate(message)).outputs
        assert (list(outputs.token_ids), outputs.text, outputs.num_tokens) == ([], "", 4)


@over_asyncio
async def test_without_a_limit_the_answer_fills_the_context():
    async with worker(max_model_len=20) as stand_in:
        for tokens in (0, 1000):
            outputs = (await stand_in.generate(request("stopping { ignore_eos: true }", tokens=tokens))).outputs
            assert outputs.num_tokens == 17


@over_asyncio
async def test_truncation_keeps_the_end_of_the_prompt():
    async with worker() as stand_in:
        truncated = await stand_in.generate(request("truncate_prompt_tokens: 2 response { prompt_token_ids: true }", prompt=[7, 8, 9]))
        assert list(truncated.prompt_info.token_ids) == [8, 9]
        assert list(truncated.outputs.token_ids) == await stand_in.tokens(request(prompt=[8, 9]))


@over_asyncio
async def test_logprobs_ranks_and_the_best_candidates_belong_together():
    async with worker() as stand_in:
        text = "temperature: 2 sampling { seed: 3 } response { output_logprobs: true output_candidates { top_n: 5 } }"
        outputs = (await stand_in.generate(request(text, tokens=64))).outputs
        assert len(outputs.logprobs) == len(outputs.ranks) == len(outputs.candidate_tokens) == 64
        for token, logprob, rank, candidates in zip(
            outputs.token_ids, outputs.logprobs, outputs.ranks, outputs.candidate_tokens, strict=True
        ):
            listed = candidates.tokens
            assert [candidate.rank for candidate in listed] == [1, 2, 3, 4, 5]
            assert [candidate.logprob for candidate in listed] == sorted((c.logprob for c in listed), reverse=True)
            assert math.isfinite(logprob)
            if rank <= 5:
                assert (listed[rank - 1].id, listed[rank - 1].logprob) == (token, logprob)
            else:
                assert token not in {candidate.id for candidate in listed}
                assert logprob <= listed[-1].logprob
        assert max(outputs.ranks) > 5


@over_asyncio
async def test_chosen_candidates_keep_their_order_and_are_ranked_by_their_place():
    async with worker() as stand_in:
        text = "response { output_logprobs: true output_candidates { token_ids { ids: [9, 9, 4] } } }"
        outputs = (await stand_in.generate(request(text, tokens=1))).outputs
        listed = outputs.candidate_tokens[0].tokens
        assert [(candidate.id, candidate.rank) for candidate in listed] == [(9, 1), (9, 2), (4, 3)]
        assert listed[0].logprob == listed[1].logprob


@over_asyncio
async def test_logprobs_without_candidates_have_empty_candidates():
    async with worker() as stand_in:
        outputs = (await stand_in.generate(request("response { output_logprobs: true }", tokens=2))).outputs
        assert [len(candidates.tokens) for candidates in outputs.candidate_tokens] == [0, 0]


@over_asyncio
async def test_prompt_logprobs_start_with_zeros_and_agree_with_generation():
    async with worker() as stand_in:
        made = await stand_in.generate(request("response { output_logprobs: true }"))
        prompt = [1, 2, 3, *made.outputs.token_ids]
        text = "response { prompt_logprobs: true prompt_candidates { top_n: 2 } }"
        info = (await stand_in.generate(request(text, prompt=prompt, tokens=1))).prompt_info
        assert (info.logprobs[0], info.ranks[0], len(info.candidate_tokens[0].tokens)) == (0.0, 0, 0)
        assert len(info.logprobs) == len(info.ranks) == len(info.candidate_tokens) == 7
        assert list(info.logprobs[3:]) == list(made.outputs.logprobs)
        assert list(info.ranks[3:]) == [1, 1, 1, 1]
        assert [candidates.tokens[0].id for candidates in info.candidate_tokens[3:]] == list(made.outputs.token_ids)


@over_asyncio
async def test_a_prompt_of_one_token_has_the_entry_of_its_first_position():
    async with worker() as stand_in:
        info = (await stand_in.generate(request("response { prompt_logprobs: true }", prompt=[1]))).prompt_info
        assert (list(info.logprobs), list(info.ranks), len(info.candidate_tokens)) == ([0.0], [0], 1)


@over_asyncio
async def test_a_stop_token_is_reported_and_stays_in_the_ids_but_not_in_the_text():
    async with worker() as stand_in:
        text = "decoding { allowed_token_ids: 65 } stopping { stop_token_ids: 65 min_new_tokens: 0 }"
        outputs = (await stand_in.generate(request(text))).outputs
        assert (list(outputs.token_ids), outputs.text) == ([65], "")
        assert outputs.finish_info.finish_reason == pb.FinishInfo.STOP
        assert (outputs.finish_info.WhichOneof("stop_reason"), outputs.finish_info.stop_token_id) == ("stop_token_id", 65)


@over_asyncio
async def test_the_end_of_sequence_is_reported_as_such_unless_it_is_ignored():
    async with worker() as stand_in:
        ended = (await stand_in.generate(request(FORCE.format(token=256)))).outputs
        assert (ended.finish_info.WhichOneof("stop_reason"), ended.finish_info.eos_token_id) == ("eos_token_id", 256)
        ignored = (await stand_in.generate(request(FORCE.format(token=256) + "stopping { ignore_eos: true }"))).outputs
        assert (list(ignored.token_ids), ignored.finish_info.finish_reason) == ([256] * 4, pb.FinishInfo.LENGTH)
        both = "stopping { ignore_eos: true stop_token_ids: 256 }"
        stopped = (await stand_in.generate(request(FORCE.format(token=256) + both))).outputs
        assert stopped.finish_info.stop_token_id == 256


@pytest.mark.parametrize(("skip", "text"), [("true", ""), ("false", "<|endoftext|>" * 4)])
@over_asyncio
async def test_special_tokens_are_in_the_text_only_when_they_are_not_skipped(skip, text):
    async with worker() as stand_in:
        options = f"stopping {{ ignore_eos: true }} response {{ skip_special_tokens: {skip} }}"
        assert (await stand_in.generate(request(FORCE.format(token=256) + options))).outputs.text == text


@over_asyncio
async def test_a_text_prompt_is_its_bytes():
    async with worker() as stand_in:
        message = pb.GenerateRequest(text="hé", response=pb.ResponseOptions(prompt_token_ids=True))
        message.stopping.max_new_tokens = 1
        response = await stand_in.generate(message)
        assert bytes(response.prompt_info.token_ids).decode() == "hé"


@over_asyncio
async def test_integral_numbers_in_transfer_parameters_stay_integers_and_come_back_as_doubles():
    async with worker() as stand_in:
        message = request(tokens=1)
        message.kv.kv_transfer_params.update({"do_remote_decode": True, "remote_block_ids": None})
        params = (await stand_in.generate(message)).outputs.finish_info.kv_transfer_params
        assert params["do_remote_prefill"] is True
        port: Any = params["remote_port"]
        assert port == int(port) > 0
        decode = request(prompt=[1, 2, 3], tokens=2)
        decode.kv.kv_transfer_params.update({"do_remote_prefill": True, "remote_prefill_cached_tokens": 2})
        assert (await stand_in.generate(decode)).outputs.finish_info.num_cached_tokens == 2
