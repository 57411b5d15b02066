"""How a reply is laid out, in one message and in a stream."""

import pytest

from core.wire.generated import inference_pb2 as pb
from tests.conformance.over_grpc.client import PROMPT, request
from tests.conformance.over_grpc.coverage import exercises


@exercises("Inference.Generate", "GenerateRequest.token_ids", "TokenIds.ids", "GenerateResponse.prompt_info", "GenerateResponse.outputs")
@exercises("PromptInfo.num_prompt_tokens", "SequenceOutput.finish_info", "FinishInfo.num_output_tokens", "FinishInfo.finish_reason")
async def test_a_unary_reply_is_one_message_with_everything(client):
    reply = await client.generate(request(tokens=3))
    assert reply.prompt_info == pb.PromptInfo(num_prompt_tokens=len(PROMPT))
    assert (reply.outputs.num_tokens, len(reply.outputs.token_ids)) == (3, 3)
    assert (reply.outputs.finish_info.num_output_tokens, reply.outputs.finish_info.finish_reason) == (3, pb.FinishInfo.LENGTH)


@exercises("Inference.GenerateStream", "SequenceOutput.num_tokens", "SequenceOutput.token_ids")
async def test_a_stream_begins_with_the_prompt_and_ends_with_the_finish(client):
    first, *others = await client.stream(request(tokens=3))
    assert first.HasField("prompt_info")
    assert not first.HasField("outputs")
    assert not any(message.HasField("prompt_info") for message in others)
    assert [message.outputs.HasField("finish_info") for message in others] == [False] * (len(others) - 1) + [True]
    assert sum(message.outputs.num_tokens for message in others) == others[-1].outputs.finish_info.num_output_tokens == 3


async def test_a_stream_has_one_message_for_each_output_of_the_engine(client):
    messages = await client.stream(request(tokens=20))
    assert [message.outputs.num_tokens for message in messages] == [0] + [1] * 20


async def test_a_single_token_comes_together_with_its_finish(client):
    messages = await client.stream(request(tokens=1))
    assert len(messages) == 2
    assert messages[1].outputs.finish_info.finish_reason == pb.FinishInfo.LENGTH


async def test_stream_and_unary_say_the_same(client):
    asked = request("response { output_logprobs: true output_candidates { top_n: 2 } }", tokens=12)
    whole = await client.generate(asked)
    joined = pb.GenerateResponse()
    for message in await client.stream(asked):
        joined.MergeFrom(message)
        if message.HasField("outputs"):
            joined.outputs.text, joined.outputs.num_tokens = "", 0
    whole.outputs.text, whole.outputs.num_tokens = "", 0
    # What the first of the two left in the prefix cache is the second one's.
    whole.outputs.finish_info.ClearField("num_cached_tokens")
    joined.outputs.finish_info.ClearField("num_cached_tokens")
    assert joined == whole


@exercises("GenerateRequest.response", "ResponseOptions.output_text", "SequenceOutput.text", "ResponseOptions.output_token_ids")
async def test_text_is_the_default_and_token_ids_are_not(client):
    plain = request("stopping { max_new_tokens: 20 }")
    plain.ClearField("response")
    outputs = (await client.generate(plain)).outputs
    assert (outputs.num_tokens, list(outputs.token_ids)) == (20, [])
    assert outputs.text
    tokens_only = (await client.generate(request("response { output_text: false }", tokens=20))).outputs
    assert (tokens_only.text, len(tokens_only.token_ids)) == ("", 20)


async def test_text_in_a_stream_comes_in_pieces(client):
    messages = await client.stream(request(tokens=20))
    assert "".join(message.outputs.text for message in messages) == (await client.generate(request(tokens=20))).outputs.text


@exercises("ResponseOptions.prompt_token_ids", "PromptInfo.token_ids")
async def test_the_prompt_comes_back_when_asked_for(client):
    asked = request("response { prompt_token_ids: true }")
    assert list((await client.generate(asked)).prompt_info.token_ids) == list(PROMPT)
    assert list((await client.stream(asked))[0].prompt_info.token_ids) == list(PROMPT)
    assert list((await client.generate(request())).prompt_info.token_ids) == []


@exercises("GenerateRequest.text")
async def test_a_text_prompt_is_tokenized_by_the_server(client):
    reply = await client.generate(request('text: "Hello, w!" response { prompt_token_ids: true }'))
    assert reply.prompt_info.num_prompt_tokens == len(reply.prompt_info.token_ids) > 0
    assert reply.outputs.num_tokens == 4


@exercises("GenerateRequest.truncate_prompt_tokens")
async def test_truncation_keeps_the_end_of_the_prompt(client):
    reply = await client.generate(request("truncate_prompt_tokens: 3 response { prompt_token_ids: true }"))
    assert list(reply.prompt_info.token_ids) == list(PROMPT[-3:])
    assert list(reply.outputs.token_ids) == await client.tokens(request(prompt=PROMPT[-3:]))


@exercises("FinishInfo.num_cached_tokens")
async def test_the_cached_part_of_the_prompt_is_told_from_0_33_on(client, version):
    prompt = [*range(32, 232), 40]
    infos = [(await client.generate(request(prompt=prompt))).outputs.finish_info for _ in range(2)]
    if version >= (0, 33):
        assert [info.num_cached_tokens for info in infos] == [0, 192], "whole blocks of 16"
    else:
        assert not any(info.HasField("num_cached_tokens") for info in infos)


@pytest.mark.parametrize("prompt", [(65,), tuple(range(32, 96)) * 30])
async def test_any_length_of_prompt_is_counted(client, prompt):
    assert (await client.generate(request(prompt=prompt, tokens=1))).prompt_info.num_prompt_tokens == len(prompt)


async def test_a_character_comes_out_with_its_last_byte(scripted):
    messages = await scripted.stream(request(prompt=[19, *"aé".encode()], tokens=3))
    assert [message.outputs.text for message in messages] == ["", "a", "", "é"]
    assert [message.outputs.num_tokens for message in messages] == [0, 1, 1, 1]


@exercises("SequenceOutput.sampling_mask")
async def test_sampling_masks_come_on_the_last_message(scripted):
    *early, last = await scripted.stream(request(prompt=[12, 65], tokens=3))
    assert not any(message.outputs.sampling_mask for message in early)
    tokens = [message.outputs.token_ids[0] for message in [*early[1:], last]]
    assert [list(row.ids) for row in last.outputs.sampling_mask] == [[token, token + 1] for token in tokens]
