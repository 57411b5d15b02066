"""How tokens are chosen: what all workers keep to, and what of a request reaches an engine."""

import pytest

from tests.conformance.over_grpc.client import PROMPT, request
from tests.conformance.over_grpc.coverage import exercises

RANDOM = "temperature: 1.0"


@exercises("GenerateRequest.temperature", "GenerateRequest.sampling", "RandomSampling.seed")
async def test_a_seed_makes_sampling_repeatable(client):
    outputs = [await client.tokens(request(f"{RANDOM} sampling {{ seed: {seed} }}", tokens=24)) for seed in (1, 2, 1)]
    assert outputs[0] == outputs[2] != outputs[1]


async def test_without_a_temperature_the_likeliest_token_is_taken(client):
    asked = "response { output_logprobs: true }"
    assert set((await client.generate(request(asked, tokens=24))).outputs.ranks) == {1}
    assert await client.tokens(request(tokens=24)) == await client.tokens(request("temperature: 0", tokens=24))


async def test_the_prompt_decides_the_output(client):
    assert await client.tokens(request(tokens=8)) == await client.tokens(request(tokens=8))
    assert await client.tokens(request(tokens=8)) != await client.tokens(request(prompt=[*PROMPT, 65], tokens=8))


@exercises("GenerateRequest.kv", "KVCacheParameters.cache_salt", "KVCacheParameters.bypass_prefix_cache")
async def test_a_salt_keeps_caches_apart_and_changes_no_token(client, version):
    prompt = [*range(34, 234), 42]

    async def call(salt, *, bypass=False):
        reply = await client.generate(request(f'kv {{ cache_salt: "{salt}" bypass_prefix_cache: {str(bypass).lower()} }}', prompt=prompt))
        return list(reply.outputs.token_ids), reply.outputs.finish_info.num_cached_tokens

    output, first = await call("one")
    cached = 192 if version >= (0, 33) else 0
    assert first == 0
    assert await call("one") == (output, cached)
    assert await call("two") == (output, 0)
    assert await call("one", bypass=True) == (output, 0)


@exercises("RandomSampling.num_sequences", "RandomSampling.top_k", "RandomSampling.top_p", "RandomSampling.min_p")
@exercises("GenerateRequest.decoding", "DecodingParameters.presence_penalty", "DecodingParameters.frequency_penalty")
@exercises("DecodingParameters.repetition_penalty", "DecodingParameters.logit_bias", "DecodingParameters.allowed_token_ids")
@exercises("DecodingParameters.bad_words_token_ids", "StoppingCriteria.thinking_token_budget", "GenerateRequest.watermarking")
async def test_sampling_parameters_reach_the_engine_as_they_are(scripted):
    added = await _added(
        scripted,
        """temperature: 0.5 watermarking: true
        sampling { num_sequences: 1 top_k: 7 top_p: 0.5 min_p: 0.25 seed: -3 }
        decoding {
          presence_penalty: 0.5 frequency_penalty: -0.5 repetition_penalty: 1.5 allowed_token_ids: [65, 66]
          logit_bias { key: 65 value: 2.5 } logit_bias { key: 66 value: 500 }
          bad_words_token_ids { ids: [70, 71] }
        }
        stopping { min_new_tokens: 2 stop_token_ids: [90] thinking_token_budget: 3 }""",
    )
    expected = {"temperature": 0.5, "top_k": 7, "top_p": 0.5, "min_p": 0.25, "seed": -3, "max_tokens": 4, "min_tokens": 2}
    expected |= {"presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.5, "allowed_token_ids": [65, 66]}
    expected |= {"thinking_token_budget": 3, "logit_bias": {"65": 2.5, "66": 100.0}, "stop_token_ids": [90], "watermarking": True}
    assert {key: added["sampling_params"].get(key) for key in expected} == expected
    assert added["sampling_params"]["_bad_words_token_ids"] == [[70, 71]]


@exercises("GenerateRequest.request_id", "GenerateRequest.priority", "GenerateRequest.session_id", "GenerateRequest.model")
async def test_who_asks_reaches_the_engine(scripted):
    added = await _added(scripted, 'request_id: "who" model: "tiny" priority: -7 session_id: "s1" kv { cache_salt: "v3" }')
    assert added["request_id"].startswith("who-")
    assert added["external_req_id"] == "who"
    assert (added["priority"], added["session_id"], added["cache_salt"]) == (-7, "s1", "v3")


@exercises("GenerateRequest.kv_hints", "KVHintsEnvelope.protocol_version", "KVHintsEnvelope.message_id", "KVHintsEnvelope.actions")
@exercises("KVHintAction.action_id", "KVHintAction.action_type", "KVHintAction.action_version", "KVHintAction.payload")
async def test_cache_hints_reach_the_engine_untouched(scripted):
    added = await _added(
        scripted,
        """kv_hints { protocol_version: "1" message_id: "m" actions {
          action_id: "a" action_type: "pin" action_version: "2"
          payload { fields { key: "until" value { number_value: 5 } } }
        } }""",
    )
    action = {"action_id": "a", "action_type": "pin", "action_version": "2", "payload": {"until": 5}}
    assert added["kv_hints"] == {"protocol_version": "1", "message_id": "m", "actions": [action]}


@exercises("GenerateRequest.engine_reasoning_gate", "EngineReasoningGate.reasoning_ended", "EngineReasoningGate.chat_template_kwargs")
async def test_the_reasoning_gate_reaches_the_engine(scripted):
    kwargs = 'chat_template_kwargs { fields { key: "thinking" value { bool_value: true } } }'
    added = await _added(scripted, f"engine_reasoning_gate {{ reasoning_ended: false {kwargs} }}")
    assert added["reasoning_ended"] is False
    assert added["reasoning_parser_kwargs"] == {"chat_template_kwargs": {"thinking": True}}


@exercises("DecodingParameters.json", "DecodingParameters.regex", "DecodingParameters.choice", "DecodingParameters.StringChoices.choices")
@exercises("DecodingParameters.grammar", "DecodingParameters.json_object", "DecodingParameters.structural_tag")
async def test_every_kind_of_structured_output_reaches_the_engine(scripted):
    tag = r"{\"type\": \"structural_tag\", \"format\": {\"type\": \"any_text\"}}"
    for text, kind, value in [
        (r'json: "{\"type\": \"object\"}"', "json", {"type": "object"}),
        ('regex: "a+"', "regex", "a+"),
        ('choice { choices: ["yes", "no"] }', "choice", ["yes", "no"]),
        ('grammar: "root ::= \\"a\\""', "grammar", 'root ::= "a"'),
        ("json_object: true", "json_object", True),
        (f'structural_tag: "{tag}"', "structural_tag", '{"type": "structural_tag", "format": {"type": "any_text"}}'),
    ]:
        structured = (await _added(scripted, f"decoding {{ {text} }}"))["sampling_params"]["structured_outputs"]
        given = {key: item for key, item in structured.items() if item is not None}
        assert given[kind] == value, text
    added = await _added(scripted, "decoding { json_object: false }")
    assert added["sampling_params"].get("structured_outputs") is None


@pytest.mark.parametrize(("given", "taken"), [("0.005", 0.005), ("0.00001", 0.00001)])
async def test_the_server_leaves_tiny_temperatures_to_the_engine(scripted, given, taken):
    assert (await _added(scripted, f"temperature: {given}"))["sampling_params"]["temperature"] == pytest.approx(taken)


async def test_what_is_omitted_reaches_the_engine_as_nothing(scripted):
    sampling = (await _added(scripted, ""))["sampling_params"]
    assert sampling["temperature"] == 0
    absent = ("seed", "logprobs", "prompt_logprobs", "logit_bias", "allowed_token_ids", "structured_outputs", "thinking_token_budget")
    assert {key: sampling.get(key) for key in absent} == dict.fromkeys(absent)


async def _added(client, text):
    """The request as the engine got it."""
    since = len(client.worker.engine_events())
    await client.generate(request(text))
    return next(event for event in client.worker.engine_events()[since:] if event["event"] == "add")
