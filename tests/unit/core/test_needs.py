"""Nothing is silently dropped: every field of a call goes over gRPC, or is a need that decides for another wire."""

import msgspec
import pytest

from core.call import Identity, SamplingParams, StructuredOutputs
from core.northbound.body import parse_call
from core.wire.grpc_lowering import lower_to_grpc
from core.wire.http_lowering import lower_to_http
from core.wire.needs import (
    CACHED_PROMPT_LOGPROBS,
    GRPC_CAN,
    LARGE_INTEGERS,
    OVER_HTTP,
    PYTHON_HTTP_CAN,
    RUST_HTTP_CAN,
    SAMPLING_NEEDS,
    STREAMED_HAND_OVER,
    STREAMED_PROMPT_LOGPROBS,
    missing,
    refusal,
)
from core.wire.transfers import needs_with_transfers
from tests.unit.core.rig import make_call

#: They shape text, and the route answers in tokens.
SHAPES_TEXT = {"detokenize", "skip_special_tokens", "spaces_between_special_tokens"}

#: A value for each field of `sampling_params` that differs from what is meant when it is absent.
VALUES = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 7,
    "max_tokens": 4,
    "min_tokens": 2,
    "ignore_eos": True,
    "stop": ["a"],
    "stop_token_ids": [3],
    "include_stop_str_in_output": True,
    "thinking_token_budget": 9,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.5,
    "repetition_detection": {"max_pattern_size": 3},
    "logit_bias": {"3": 1.5},
    "allowed_token_ids": [3],
    "bad_words": ["a"],
    "bad_words_token_ids": [[3, 4]],
    "structured_outputs": {"regex": "a"},
    "logprobs": 2,
    "prompt_logprobs": 2,
    "logprob_token_ids": [3],
    "prompt_logprob_token_ids": [[3]],
    "prompt_logprob_start": 1,
    "skip_reading_prefix_cache": True,
    "routed_experts_prompt_start": 1,
    "trace_decode_token_ids": [3],
    "stream_interval": 2,
    "watermarking": False,
    "vllm_xargs": {"a": 1},
    "extra_args": {"a": 1},
}


def call_with(**sampling):
    return parse_call(msgspec.json.encode({"token_ids": [1, 2], "request_id": "r1", "sampling_params": sampling}), {})


def lowered(call):
    return lower_to_grpc(call, index=0, max_model_len=100)


def test_there_is_a_value_for_every_field():
    assert set(VALUES) | SHAPES_TEXT | {"n"} == set(SamplingParams.__struct_fields__)


@pytest.mark.parametrize("field", VALUES)
def test_every_sampling_param_goes_over_grpc_or_is_a_need(field):
    call = call_with(**{field: VALUES[field]})
    changes = lowered(call) != lowered(call_with())
    assert changes or call.needs - GRPC_CAN, f"{field} would be dropped"
    if call.needs - GRPC_CAN:
        assert call.needs == {f"sampling_params.{field}"}


@pytest.mark.parametrize("field", SHAPES_TEXT)
def test_what_shapes_text_is_no_need(field):
    assert call_with(**{field: True}).needs == set()


@pytest.mark.parametrize("field", VALUES)
def test_every_sampling_param_goes_over_http(field):
    assert lower_to_http(call_with(**{field: VALUES[field]}), index=0, max_model_len=100) != lower_to_http(
        call_with(), index=0, max_model_len=100
    )


@pytest.mark.parametrize("field", StructuredOutputs.__struct_fields__)
def test_every_kind_and_option_of_structured_outputs_goes_over_grpc_or_is_a_need(field):
    values = {"json": {"type": "object"}, "choice": ["a"], "json_object": True, "structural_tag": "{}", "regex": "a", "grammar": "a"}
    option = {field: values.get(field, "x" if field == "whitespace_pattern" else True)}
    call = call_with(structured_outputs={"regex": "a", **option} if field not in values else option)
    if field in values:
        assert lowered(call).decoding.WhichOneof("structured_output") == field
        assert call.needs == set()
    else:
        assert call.needs == {f"sampling_params.structured_outputs.{field}"}


#: Fields of a call that are on its way, but not for the worker.
OURS = {
    "role",
    "owner",
    "legs",
    "hold",
    "retries",
    "stream",
    "stream_options",
    "headers",
    "unclaimed",
    "unclaimed_sampling",
    "cache_salt",  # becomes the identity's
    "needs",
    "notes",
    "reply_headers",
    "reply_model",
    "created",
    "started",
    "relayed",
    "touches_kv",
    "data_parallel_rank",  # the placement's, see test_ranks
    "needed_by",
}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("id", "r2"),
        ("token_ids", [9]),
        ("sampling", SamplingParams(seed=1)),
        ("model", "tiny"),
        ("identity", Identity("salt")),
        ("priority", -3),
        ("session_id", "s"),
        ("adapter", "math"),
        ("kv_transfer_params", {}),
        ("kv_transfer_params", {"a": 1}),
        ("ec_transfer_params", {"a": 1}),
        ("return_token_ids", True),
        ("reasoning_ended", False),
    ],
)
def test_every_field_of_a_call_goes_over_grpc(field, value):
    plain = make_call()
    assert lowered(msgspec.structs.replace(plain, **{field: value})) != lowered(plain)


def test_the_lists_above_are_all_fields_of_a_call():
    tested = {"id", "token_ids", "sampling", "model", "identity", "priority", "session_id", "adapter", "return_token_ids"}
    tested |= {"kv_transfer_params", "ec_transfer_params", "reasoning_ended", "reasoning_parser_kwargs"}
    assert tested | OURS == set(make_call().__struct_fields__)


def test_streamed_prompt_logprobs_are_a_need_of_their_own():
    body = {"token_ids": [1], "sampling_params": {"prompt_logprobs": 0}}
    assert parse_call(msgspec.json.encode(body), {}).needs == set()
    assert parse_call(msgspec.json.encode({**body, "stream": True}), {}).needs == {STREAMED_PROMPT_LOGPROBS}


def needs(stream=False, sampling=None, **members):
    body = {"token_ids": [1], "sampling_params": sampling or {}, "stream": stream, **members}
    return parse_call(msgspec.json.encode(body), {}).needs


def test_a_hand_over_in_a_stream_is_a_need_of_its_own():
    params = {"do_remote_decode": True, "do_remote_prefill": False}
    assert needs(kv_transfer_params=params) == set()
    assert needs(stream=True, kv_transfer_params={**params, "do_remote_decode": False}) == set()
    assert needs(stream=True, kv_transfer_params=params) == {STREAMED_HAND_OVER} <= GRPC_CAN
    assert not {STREAMED_HAND_OVER} & (RUST_HTTP_CAN | PYTHON_HTTP_CAN)


def test_a_cache_that_may_be_read_for_prompt_logprobs_is_a_need_because_grpc_has_no_false():
    assert needs(sampling={"skip_reading_prefix_cache": False}) == set()
    assert needs(sampling={"skip_reading_prefix_cache": True, "prompt_logprobs": 0}) == set()
    assert needs(sampling={"skip_reading_prefix_cache": False, "prompt_logprobs": 0}) == {CACHED_PROMPT_LOGPROBS}
    assert CACHED_PROMPT_LOGPROBS not in GRPC_CAN


@pytest.mark.parametrize("field", LARGE_INTEGERS)
@pytest.mark.parametrize("number", [2**53, -(2**53), 2**70])
def test_integers_that_are_no_doubles_are_a_need_wherever_they_are(field, number):
    def with_number(number):
        value = {"a": None, "b": [{"c": number}], "d": "x", "e": True, "f": 1e300}
        return needs(False, None, **{field: {"chat_template_kwargs": value} if field == "reasoning_parser_kwargs" else value})

    assert with_number(number) == {LARGE_INTEGERS[field]}
    assert with_number(number - (1 if number > 0 else -1)) == (set() if abs(number) == 2**53 else {LARGE_INTEGERS[field]})
    assert LARGE_INTEGERS[field] not in GRPC_CAN


def test_needs_of_transfer_parameters_are_renewed_with_them():
    call = make_call(stream=True, needs={"sampling_params.stop"}, kv_transfer_params={"do_remote_decode": True, "id": 2**60})
    call.needs = needs_with_transfers(call)
    assert call.needs == {"sampling_params.stop", STREAMED_HAND_OVER, LARGE_INTEGERS["kv_transfer_params"]}
    call.kv_transfer_params = {"do_remote_prefill": True, "id": 2**50}
    assert needs_with_transfers(call) == {"sampling_params.stop"}


def test_every_need_is_the_path_of_a_field_and_has_a_wire():
    for key, need in SAMPLING_NEEDS:
        assert need == f"sampling_params.{key}"
        assert key in SamplingParams.__struct_fields__
        assert need in GRPC_CAN | RUST_HTTP_CAN | PYTHON_HTTP_CAN


def test_what_no_wire_can_is_missing_and_else_what_some_cannot():
    stop, words = "sampling_params.stop", "sampling_params.bad_words"
    assert missing({stop, words}, [GRPC_CAN]) == {words}
    assert missing({stop, words, OVER_HTTP}, [GRPC_CAN, RUST_HTTP_CAN]) == {stop, words, OVER_HTTP}
    assert missing({stop, "a"}, [frozenset({stop, "a"}) - {"a"}, frozenset({stop})]) == {"a"}
    assert missing({words, stop, "a"}, [frozenset({stop, "a"}), frozenset({words, "a"})]) == {words, stop}


def test_a_refusal_names_each_need_and_who_serves_it():
    assert refusal(["sampling_params.trace_decode_token_ids"], {}) == (
        "no worker can serve sampling_params.trace_decode_token_ids (needs the Python HTTP server)",
        "sampling_params.trace_decode_token_ids",
    )
    assert refusal({"sampling_params.stop", "a plugin's"}, {}) == (
        "no worker can serve a plugin's (needs another worker) and sampling_params.stop (needs grpc or the Python HTTP server) in one call",
        "a plugin's",
    )


def test_a_refusal_names_the_clients_fields_for_the_need_that_comes_from_them():
    by = {OVER_HTTP: ("content_parts", "plugins.x.always")}
    http = "(needs the Python HTTP server or the Rust HTTP server)"
    assert refusal({OVER_HTTP}, by) == (
        f"no worker can serve content_parts {http} and plugins.x.always {http} in one call",
        "content_parts",
    )
    assert refusal({OVER_HTTP}, {OVER_HTTP: ("plugins.x.always",)}) == (f"no worker can serve plugins.x.always {http}", None)
    assert refusal({OVER_HTTP}, {}) == (f"no worker can serve HTTP {http}", None)


@pytest.mark.parametrize(
    ("need", "field"),
    [
        (STREAMED_PROMPT_LOGPROBS, "sampling_params.prompt_logprobs"),
        (STREAMED_HAND_OVER, "kv_transfer_params.do_remote_decode"),
        (CACHED_PROMPT_LOGPROBS, "sampling_params.skip_reading_prefix_cache"),
        *((need, field) for field, need in LARGE_INTEGERS.items()),
    ],
)
def test_the_param_of_a_refusal_is_a_field_also_where_the_need_is_more_than_its_path(need, field):
    message, param = refusal({need}, {})
    assert need in message
    assert param == field
