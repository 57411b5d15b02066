"""A call as vLLM's gRPC request, field by field."""

import struct
from typing import Any

import pytest

from core.call import Identity, ReasoningParserKwargs, SamplingParams, StructuredOutputs
from core.errors import BadRequest
from core.wire.generated.inference_pb2 import GenerateRequest
from core.wire.grpc_lowering import lower_to_grpc
from tests.unit.core.rig import make_call


def lowered(index: int = 0, **fields: Any):
    sampling = fields.pop("sampling", {})
    return lower_to_grpc(make_call(sampling=SamplingParams(**sampling), **fields), index=index, max_model_len=100)


def test_what_is_absent_means_what_it_means_over_http():
    request = lowered()
    assert request.temperature == 1.0
    assert request.stopping.max_new_tokens == 100  # the worker cuts it to what the prompt leaves
    assert not request.sampling.HasField("seed")
    assert not request.sampling.HasField("top_k")
    assert not request.HasField("watermarking")
    assert not request.HasField("session_id")
    assert not request.HasField("engine_reasoning_gate")
    assert not request.kv.HasField("kv_transfer_params")


def test_an_explicit_zero_is_told_from_absence():
    request = lowered(sampling={"temperature": 0.0, "seed": 0, "top_k": 0, "min_p": 0.0, "watermarking": False})
    assert request.HasField("temperature")
    assert request.temperature == 0.0
    assert request.sampling.HasField("seed")
    assert request.sampling.HasField("top_k")
    assert request.sampling.HasField("min_p")
    assert request.HasField("watermarking")


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_an_explicit_zero_of_a_penalty_is_sent_as_one_that_changes_nothing(name, zero):
    received = GenerateRequest.FromString(lowered(sampling={name: zero}).SerializeToString())
    sent = getattr(received.decoding, name)
    assert sent > 0
    assert all(float32(logit - sent) == logit for logit in (float32(1e-20), -0.5, 30.0))
    assert getattr(lowered(sampling={name: -0.5}).decoding, name) == -0.5
    assert getattr(lowered().decoding, name) == 0


def float32(number: float) -> float:
    return struct.unpack("f", struct.pack("f", number))[0]


def test_the_prompt_and_the_names_go_as_they_are():
    request = lowered(token_ids=[0, 2**32 - 1], model="tiny", adapter="math", identity=Identity("v7"), session_id="s", priority=-4)
    assert list(request.token_ids.ids) == [0, 2**32 - 1]
    assert (request.request_id, request.model, request.lora_name, request.kv.cache_salt) == ("r1", "tiny", "math", "v7")
    assert (request.session_id, request.priority) == ("s", -4)


def test_only_tokens_are_asked_for_and_no_text():
    response = lowered().response
    assert response.HasField("output_text")
    assert not response.output_text
    assert response.output_token_ids
    assert not response.output_logprobs
    assert not response.HasField("output_candidates")
    assert not response.prompt_logprobs


@pytest.mark.parametrize(
    ("count", "selected"),
    [(0, None), (1, ("top_n", 1)), (20, ("top_n", 20)), (-1, ("all", True))],
)
def test_counts_of_candidates(count, selected):
    response = lowered(sampling={"logprobs": count, "prompt_logprobs": count}).response
    assert response.output_logprobs
    assert response.prompt_logprobs
    for name in ("output_candidates", "prompt_candidates"):
        if selected is None:
            assert not response.HasField(name)
        else:
            candidates = getattr(response, name)
            assert (candidates.WhichOneof("select"), getattr(candidates, selected[0])) == selected


def test_selected_ids_keep_their_order_and_their_duplicates_and_ask_for_logprobs():
    response = lowered(sampling={"logprob_token_ids": [66, 65, 66]}).response
    assert response.output_logprobs
    assert list(response.output_candidates.token_ids.ids) == [66, 65, 66]


@pytest.mark.parametrize(("top_k", "sent"), [(-1, 0), (0, 0), (5, 5)])
def test_every_way_to_say_all_tokens_is_the_one_that_grpc_knows(top_k, sent):
    assert lowered(sampling={"top_k": top_k}).sampling.top_k == sent


def test_output_i_of_n_has_its_own_id_and_a_derived_seed():
    assert lowered(1, sampling={"n": 2, "seed": 5}).sampling.seed == 6
    assert lowered(1, sampling={"n": 2, "seed": 5}).request_id == "r1-1"
    assert lowered(1, sampling={"n": 2, "seed": -1}).sampling.seed == -1
    assert not lowered(1, sampling={"n": 2}).sampling.HasField("seed")
    assert lowered(0, sampling={"n": 1}).request_id == "r1"
    assert lowered(0, sampling={"n": 2}).sampling.num_sequences in (0, 1)


def test_the_largest_seed_is_carried():
    assert lowered(1, sampling={"n": 2, "seed": 2**63 - 2}).sampling.seed == 2**63 - 1


def test_stopping():
    stopping = lowered(
        sampling={
            "max_tokens": 5,
            "min_tokens": 2,
            "stop": "x",
            "stop_token_ids": [4],
            "include_stop_str_in_output": True,
            "ignore_eos": True,
            "thinking_token_budget": -1,
        }
    ).stopping
    assert (stopping.max_new_tokens, stopping.min_new_tokens, list(stopping.stop_strings)) == (5, 2, ["x"])
    assert (list(stopping.stop_token_ids), stopping.include_stop_strings, stopping.ignore_eos) == ([4], True, True)
    assert stopping.thinking_token_budget == -1


def test_decoding():
    decoding = lowered(
        sampling={
            "presence_penalty": 0.5,
            "frequency_penalty": -0.5,
            "repetition_penalty": 1.5,
            "logit_bias": {3: 1.5, 4: -2.0},
            "allowed_token_ids": [3, 4],
            "bad_words_token_ids": [[1], [2, 3]],
        }
    ).decoding
    assert (decoding.presence_penalty, decoding.frequency_penalty, decoding.repetition_penalty) == (0.5, -0.5, 1.5)
    assert dict(decoding.logit_bias) == {3: 1.5, 4: -2.0}
    assert list(decoding.allowed_token_ids) == [3, 4]
    assert [list(word.ids) for word in decoding.bad_words_token_ids] == [[1], [2, 3]]


@pytest.mark.parametrize(
    ("wanted", "field", "value"),
    [
        ({"json": {"type": "object"}}, "json", '{"type":"object"}'),
        ({"json": '{"type": "object"}'}, "json", '{"type": "object"}'),
        ({"regex": "a+"}, "regex", "a+"),
        ({"grammar": "root ::= x"}, "grammar", "root ::= x"),
        ({"json_object": True}, "json_object", True),
        ({"structural_tag": {"a": 1}}, "structural_tag", '{"a":1}'),
    ],
)
def test_structured_outputs(wanted, field, value):
    decoding = lowered(sampling={"structured_outputs": StructuredOutputs(**wanted)}).decoding
    assert decoding.WhichOneof("structured_output") == field
    assert getattr(decoding, field) == value


def test_structured_choices():
    decoding = lowered(sampling={"structured_outputs": StructuredOutputs(choice=["a", "b"])}).decoding
    assert list(decoding.choice.choices) == ["a", "b"]


def test_the_reasoning_gate_keeps_the_presence_of_its_parts():
    gate = lowered(reasoning_ended=False).engine_reasoning_gate
    assert (gate.HasField("reasoning_ended"), gate.HasField("chat_template_kwargs")) == (True, False)
    gate = lowered(reasoning_parser_kwargs=ReasoningParserKwargs({"thinking": True})).engine_reasoning_gate
    assert (gate.HasField("reasoning_ended"), dict(gate.chat_template_kwargs.items())) == (False, {"thinking": True})


def test_bypassing_the_prefix_cache():
    assert lowered(sampling={"skip_reading_prefix_cache": True}).kv.bypass_prefix_cache
    assert not lowered(sampling={"skip_reading_prefix_cache": False}).kv.bypass_prefix_cache


@pytest.mark.parametrize("field", ["kv_transfer_params", "ec_transfer_params"])
def test_parameters_that_grpc_cannot_hold_are_a_400_with_their_name(field):
    deep: dict = {}
    for _ in range(150):
        deep = {"a": deep}
    for values in (deep, {"big": 10**400}):
        with pytest.raises(BadRequest) as raised:
            lowered(0, **{field: values})
        assert raised.value.param == field


def test_reasoning_parameters_that_grpc_cannot_hold_are_a_400_too():
    with pytest.raises(BadRequest) as raised:
        lowered(reasoning_parser_kwargs=ReasoningParserKwargs({"big": 10**400}))
    assert raised.value.param == "reasoning_parser_kwargs"
