"""Calls that are refused: their status, and that nothing else is answered. Of two broken rules the one counts that is checked first."""

from itertools import pairwise

import pytest

from core.wire import Status
from core.wire.generated import inference_pb2 as pb
from tests.conformance.over_grpc.client import PROMPT, refusal, request
from tests.workers.tiny_model import MAX_MODEL_LEN, VOCAB_SIZE

# What breaks a rule, and a phrase of the refusal that clients may match. In the order of the checks of 0.33.
RULES = [
    ("sampling { num_sequences: 2 }", "num_sequences > 1 is not supported"),
    ('decoding { json: "{" }', "json"),
    ("response { prompt_logprobs: true prompt_candidates { token_ids { ids: 1 } } }", "token_ids"),
    ("media { modality: IMAGE }", "media"),
    ('stopping { stop_strings: "" }', "stop strings cannot be empty"),
    ('kv { cache_salt: "@" }', "cache_salt"),
    (f"truncate_prompt_tokens: {MAX_MODEL_LEN + 1}", "truncate_prompt_tokens"),
    (f"token_ids {{ ids: {VOCAB_SIZE} }}", f"token_id(s) [{VOCAB_SIZE}] in prompt are out of vocabulary. Vocabulary size: {VOCAB_SIZE}"),
    (
        "response { output_logprobs: true output_candidates { top_n: 30 } }",
        "requested logprobs of 30, which is greater than max allowed: 20",
    ),
    ("response { prompt_logprobs: true prompt_candidates { top_n: 30 } }", "requested prompt_logprobs of 30"),
    ('decoding { grammar: "" }', "grammar"),
    (f"token_ids {{ ids: {[65] * MAX_MODEL_LEN} }}", f"aximum context length is {MAX_MODEL_LEN} tokens"),
    ("stopping { min_new_tokens: 50 }", "min_tokens=50"),
    ("stopping { thinking_token_budget: -2 }", "thinking_token_budget"),
    ("temperature: 9", "temperature must be in [0, 2], got 9"),
    ("sampling { top_p: 9 }", "top_p must be in (0, 1], got 9"),
    ("sampling { min_p: 9 }", "min_p must be in [0, 1], got 9"),
    ("decoding { frequency_penalty: 9 }", "frequency_penalty must be in [-2, 2], got 9"),
    ("decoding { presence_penalty: 9 }", "presence_penalty must be in [-2, 2], got 9"),
    ("decoding { repetition_penalty: -9 }", "repetition_penalty"),
    (f"stopping {{ stop_token_ids: {VOCAB_SIZE} }}", "stop_token_ids"),
    (f"decoding {{ allowed_token_ids: {VOCAB_SIZE} }}", "allowed_token_ids"),
    (f"decoding {{ logit_bias {{ key: {VOCAB_SIZE} value: 1 }} }}", "logit_bias"),
    ("decoding { bad_words_token_ids { } }", "bad_words"),
    (f"decoding {{ bad_words_token_ids {{ ids: {VOCAB_SIZE} }} }}", "bad_words"),
]

# Values that nobody checked yet in 0.31, by a word of the request.
LATER = ("cache_salt", "thinking_token_budget", "bad_words", "top_p: 0 ", "regex")

FURTHER = [
    *(f"temperature: {value}" for value in ("-0.1", "2.1", "nan", "inf")),
    *(f"sampling {{ top_p: {value} }}" for value in ("0", "-0.5", "nan")),
    *(f"decoding {{ repetition_penalty: {value} }}" for value in ("inf", "nan")),
    *(f'kv {{ cache_salt: "{salt}" }}' for salt in ("x" * 129, "a@b", "a/b", "a\\\\b", "a\\000b")),
    "decoding { " + "bad_words_token_ids { ids: 1 } " * 129 + "}",
    f"decoding {{ bad_words_token_ids {{ ids: {[1] * 1025} }} }}",
    'decoding { structural_tag: "" }',
    "decoding { choice { } }",
    'decoding { regex: "a\\000" }',
    f"response {{ output_logprobs: true output_candidates {{ token_ids {{ ids: {VOCAB_SIZE} }} }} }}",
    f"response {{ output_logprobs: true output_candidates {{ token_ids {{ ids: {[1] * 129} }} }} }}",
]

ACCEPTED = [
    'model: "tiny"',
    "temperature: 2.0",
    "sampling { num_sequences: 1 top_k: 4294967295 }",
    'kv { cache_salt: "' + "é" * 128 + '" }',
    f"token_ids {{ ids: {VOCAB_SIZE - 1} }}",
    f"token_ids {{ ids: {[65] * (MAX_MODEL_LEN - len(PROMPT) - 4)} }}",
    f"truncate_prompt_tokens: {MAX_MODEL_LEN - 4}",
    "decoding { json_object: false }",
    "response { output_candidates { top_n: 21 } }",
    "response { output_logprobs: true output_candidates { all: false } }",
    "response { output_logprobs: true output_candidates { token_ids { } } }",
    "response { output_logprobs: true output_candidates { top_n: 20 } }",
]


def _short(value):
    text = value[1] if isinstance(value, tuple) else str(value)
    return text if len(text) < 60 else f"{text[:40]}…"


@pytest.mark.parametrize("rule", RULES, ids=_short)
async def test_a_broken_rule_is_an_invalid_argument_that_says_so(client, version, rule):
    text, phrase = rule
    if version < (0, 33) and any(later in text for later in LATER):
        assert (await client.generate(request(text))).outputs.num_tokens == 4
        return
    asked = request(f'request_id: "r1" {text}')
    status, message = await refusal(client.generate(asked))
    assert status is Status.INVALID_ARGUMENT
    assert phrase in message
    assert await refusal(client.stream(asked)) == (status, message)


@pytest.mark.parametrize("rules", list(pairwise(RULES)), ids=lambda rules: f"{_short(rules[0])} - {_short(rules[1])}")
async def test_the_earlier_rule_wins(current, rules):
    (first, phrase), (second, _) = rules
    # The earlier one is merged last, for where both set the same field.
    assert phrase in (await refusal(current.generate(request(f"{second} {first}"))))[1]


@pytest.mark.parametrize("text", FURTHER, ids=_short)
async def test_further_wrong_values_are_invalid_arguments(client, version, text):
    if version < (0, 33) and any(later in text for later in LATER):
        assert (await client.generate(request(text))).outputs.num_tokens == 4
        return
    status, message = await refusal(client.generate(request(text)))
    assert (status, bool(message)) == (Status.INVALID_ARGUMENT, True)


@pytest.mark.parametrize("text", ACCEPTED, ids=_short)
async def test_values_at_the_edge_are_accepted(client, text):
    assert (await client.generate(request(text))).outputs.finish_info.num_output_tokens == 4


@pytest.mark.parametrize("prompt", [{}, {"token_ids": pb.TokenIds()}, {"text": ""}], ids=["none", "no token", "no text"])
async def test_a_prompt_without_a_token_is_an_invalid_argument(client, prompt):
    status, message = await refusal(client.generate(pb.GenerateRequest(**prompt)))
    assert (status, bool(message)) == (Status.INVALID_ARGUMENT, True)


@pytest.mark.parametrize(("length", "leaves"), [(MAX_MODEL_LEN, "no room"), (MAX_MODEL_LEN + 952, "over")])
async def test_a_prompt_that_is_too_long_is_refused_in_words_that_clients_know(client, version, length, leaves):
    _, message = await refusal(client.generate(request(prompt=[65] * length)))
    assert f"aximum context length is {MAX_MODEL_LEN} tokens" in message
    assert str(length) in message
    if version >= (0, 33):
        assert message.startswith("This model's")


async def test_an_unknown_model_is_not_found(client):
    assert await refusal(client.generate(request('model: "nope"'))) == (Status.NOT_FOUND, "model `nope` not found")
    assert (await refusal(client.stream(request('model: "nope"'))))[0] is Status.NOT_FOUND


async def test_the_model_is_checked_before_everything_but_a_rank_that_is_none(client):
    asked = request('model: "nope" sampling { num_sequences: 2 } temperature: 9')
    assert (await refusal(client.generate(asked)))[0] is Status.NOT_FOUND
    assert (await refusal(client.generate(asked, x_data_parallel_rank="seven")))[0] is Status.INVALID_ARGUMENT


async def test_a_rank_without_an_engine_is_found_out_last(client):
    status, message = await refusal(client.generate(request('model: "nope"'), x_data_parallel_rank="7"))
    assert (status, message) == (Status.NOT_FOUND, "model `nope` not found")
    _, message = await refusal(client.generate(request("temperature: 9"), x_data_parallel_rank="7"))
    assert message.startswith("temperature")
    _, message = await refusal(client.generate(request(), x_data_parallel_rank="7"))
    assert "7" in message


async def test_an_engine_that_refuses_after_the_start_ends_a_stream_behind_its_first_message(scripted):
    for prompt, status in (([2, 65], Status.INVALID_ARGUMENT), ([3, 65], Status.UNAVAILABLE), ([4, 0], Status.INTERNAL)):
        assert (await refusal(scripted.generate(request(prompt=prompt))))[0] is status
        messages = []
        async with scripted.opened(request(prompt=prompt)) as stream:
            assert (await refusal(_collect(stream, messages)))[0] is status
        assert messages == [pb.GenerateResponse(prompt_info=pb.PromptInfo(num_prompt_tokens=2))]


async def test_an_engine_that_fails_later_leaves_a_stream_its_tokens(scripted):
    messages = []
    async with scripted.opened(request(prompt=[4, 2])) as stream:
        assert await refusal(_collect(stream, messages)) == (Status.INTERNAL, "engine failed during generation")
    assert [message.outputs.num_tokens for message in messages] == [0, 1, 1]


async def _collect(stream, messages):
    async for message in stream:
        messages.append(message)
