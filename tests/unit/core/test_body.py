"""The body of the generate route: what becomes of it, and how each refusal names its field."""

import string
from contextlib import suppress

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from core.call import BODY_KEYS, Call, ReasoningParserKwargs, SamplingParams, StreamOptions
from core.errors import BadRequest
from core.northbound.body import parse_call

PLAIN = {"token_ids": [1, 2, 3], "sampling_params": {}}


def parse(body=None, headers=None, **fields):
    return parse_call(msgspec.json.encode({**(PLAIN if body is None else body), **fields}), headers or {})


def refused(raw, headers=None):
    with pytest.raises(BadRequest) as raised:
        parse_call(raw if isinstance(raw, bytes) else msgspec.json.encode(raw), headers or {})
    return raised.value


def test_a_plain_body_is_a_call_with_the_defaults():
    call = parse()
    assert (call.token_ids, call.stream, call.model, call.priority, call.needs) == ([1, 2, 3], False, "", 0, set())
    assert len(call.id) == 32
    assert call.sampling.max_tokens is None


def test_an_empty_salt_is_refused_as_vllm_does():
    error = refused({**PLAIN, "cache_salt": ""})
    assert error.param == "cache_salt"
    assert error.message.startswith("Parameter 'cache_salt' must be a non-empty string")
    assert parse(cache_salt=None).cache_salt == ""


def test_every_key_of_the_body_is_read():
    call = parse(
        request_id="r1",
        model="tiny",
        stream=True,
        stream_options={"include_usage": True},
        cache_salt="salt",
        priority=-5,
        kv_transfer_params={"a": 1},
        ec_transfer_params={"b": 2},
        return_token_ids=True,
        output_mode="tokens",
        reasoning_ended=False,
        reasoning_parser_kwargs={"chat_template_kwargs": {"x": 1}},
        sampling_params={"n": 2, "logit_bias": {"7": 1.5}},
    )
    assert (call.id, call.model, call.stream, call.cache_salt, call.priority) == ("r1", "tiny", True, "salt", -5)
    assert call.stream_options == StreamOptions(include_usage=True)
    assert (call.kv_transfer_params, call.ec_transfer_params) == ({"a": 1}, {"b": 2})
    assert (call.return_token_ids, call.reasoning_ended) == (True, False)
    assert call.reasoning_parser_kwargs == ReasoningParserKwargs({"x": 1})
    assert (call.sampling.n, call.sampling.logit_bias) == (2, {7: 1.5})


def test_the_list_of_the_bodys_keys_is_what_the_parser_knows():
    from core.northbound.body import _Body

    assert sorted(_Body.__struct_fields__) == sorted(BODY_KEYS)


def test_a_null_is_an_absent_key_everywhere():
    nulls = {key: None for key in BODY_KEYS if key not in PLAIN}
    sampling = dict.fromkeys(SamplingParams.__struct_fields__)
    call = parse(**nulls, sampling_params=sampling)
    plain = parse()
    for key in Call.__struct_fields__:
        if key not in ("id", "created", "started", "sampling"):
            assert getattr(call, key) == getattr(plain, key), key
    assert call.needs == set()
    assert all(getattr(call.sampling, key) is None for key in SamplingParams.__struct_fields__)


@pytest.mark.parametrize(
    ("body", "headers", "session", "owner"),
    [
        ({"session_id": "s"}, {}, "s", {"session_id": "s"}),
        ({"session_id": "s", "user": "u", "session_params": {"session_id": "p"}}, {}, "p", None),
        ({"session_id": "s"}, {"x-session-id": "h"}, "h", {"session_id": "s"}),
        ({"user": "u", "user_id": "i"}, {}, "", {"user": "u", "user_id": "i"}),
        ({"session_id": "", "user": None, "session_params": {}}, {}, "", {}),
    ],
)
def test_the_body_may_say_whose_call_it_is_whichever_policy_is_in_force(body, headers, session, owner):
    call = parse(headers=headers, **body)
    assert call.session_id == session
    assert call.owner == ({"session_params.session_id": "p", "user": "u", "session_id": "s"} if owner is None else owner)
    assert list(call.owner) == sorted(call.owner, key=["session_params.session_id", "user", "session_id", "user_id"].index)
    assert call.unclaimed == {}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"user": 7}, "user"),
        ({"session_params": {"session_id": [1]}}, "session_params.session_id"),
        ({"session_params": {"offset": 1}}, "session_params.offset"),
        ({"session_id": "s\r\nx-other: 1"}, "session_id"),
    ],
)
def test_what_does_not_name_an_owner_is_refused(body, param):
    with pytest.raises(BadRequest) as raised:
        parse(**body)
    assert raised.value.param == param


def test_unknown_keys_are_kept_aside_as_they_are():
    call = parse(features={"a": [1, None]}, zero=None, sampling_params={"mine": {"deep": 1}, "seed": 3})
    assert {key: msgspec.json.decode(raw) for key, raw in call.unclaimed.items()} == {"features": {"a": [1, None]}, "zero": None}
    assert call.unclaimed_sampling == {"mine": {"deep": 1}}
    assert call.sampling.seed == 3


@pytest.mark.parametrize(
    ("raw", "param", "message"),
    [
        (b"", None, "the body is not JSON"),
        (b"{", None, "the body is not JSON"),
        (b"\xff", None, "the body is not JSON"),
        (b"[]", None, "Expected `object`, got `array`"),
        (b"null", None, "Expected `object`, got `null`"),
        ({"sampling_params": {}}, "token_ids", "token_ids: this field is required"),
        ({"token_ids": [1]}, "sampling_params", "sampling_params: this field is required"),
        ({"token_ids": [], "sampling_params": {}}, "token_ids", "token_ids: Expected `array` of length >= 1"),
        ({"token_ids": [1, "a"], "sampling_params": {}}, "token_ids[1]", "token_ids[1]: Expected `int`, got `str`"),
        ({"token_ids": [-1], "sampling_params": {}}, "token_ids[0]", "token_ids[0]: Expected `int` >= 0"),
        ({"token_ids": [2**32], "sampling_params": {}}, "token_ids[0]", "token_ids[0]: Expected `int` <= 4294967295"),
        ({"token_ids": [1], "sampling_params": None}, "sampling_params", "sampling_params: Expected `object`, got `null`"),
        ({**PLAIN, "priority": 2**31}, "priority", "priority: Expected `int"),
        ({**PLAIN, "output_mode": "text"}, "output_mode", "output_mode: 'text' is none; there are 'tokens'"),
        ({**PLAIN, "stream_options": {}}, "stream_options", "stream_options: only a streamed call has them; send stream: true"),
        (
            {**PLAIN, "stream": True, "stream_options": {"usage": True}},
            "stream_options.usage",
            "stream_options.usage: there is no such key",
        ),
    ],
)
def test_a_wrong_body_is_refused_with_the_fields_path(raw, param, message):
    error = refused(raw)
    assert error.param == param
    assert error.message.startswith(message)


@pytest.mark.parametrize(
    ("sampling", "param", "message"),
    [
        ({"seed": "x"}, "sampling_params.seed", "sampling_params.seed: Expected `int | null`, got `str`"),
        ({"seed": 2**63}, "sampling_params.seed", "sampling_params.seed: "),
        ({"n": 0}, "sampling_params.n", "sampling_params.n: Expected `int` >= 1"),
        ({"n": 4097}, "sampling_params.n", "sampling_params.n: Expected `int` <= 4096"),
        ({"max_tokens": 0}, "sampling_params.max_tokens", "sampling_params.max_tokens: Expected `int` >= 1"),
        ({"top_k": -2}, "sampling_params.top_k", "sampling_params.top_k: Expected `int` >= -1"),
        ({"logprobs": True}, "sampling_params.logprobs", "sampling_params.logprobs: Expected `int | null`, got `bool`"),
        ({"stop": [1]}, "sampling_params.stop[0]", "sampling_params.stop[0]: Expected `str`, got `int`"),
        ({"logit_bias": {"a": 1}}, "sampling_params.logit_bias", "sampling_params.logit_bias: a key: Expected `int`, got `str`"),
        ({"logit_bias": {"-1": 1}}, "sampling_params.logit_bias", "sampling_params.logit_bias: a key: Expected `int` >= 0"),
        ({"structured_outputs": {"jsn": 1}}, "sampling_params.structured_outputs.jsn", "sampling_params.structured_outputs.jsn: there"),
        (
            {"structured_outputs": {"regex": "a", "json": "{}"}},
            "sampling_params.structured_outputs",
            "sampling_params.structured_outputs: json and regex exclude each other; send one",
        ),
        (
            {"logprobs": 1, "logprob_token_ids": [1, 2]},
            "sampling_params.logprobs",
            "when both logprobs and logprob_token_ids are set, logprobs must equal len(logprob_token_ids). "
            "Got logprobs=1, len(logprob_token_ids)=2.",
        ),
        (
            {"seed": 2**63 - 1, "n": 2},
            "sampling_params.seed",
            "sampling_params.seed: output i of n has seed + i, and that must stay below 2**63",
        ),
    ],
)
def test_wrong_sampling_params_are_refused_with_the_fields_path(sampling, param, message):
    error = refused({**PLAIN, "sampling_params": sampling})
    assert error.param == param
    assert error.message.startswith(message)


def test_an_error_is_found_beside_unknown_keys_too():
    error = refused({**PLAIN, "features": {}, "sampling_params": {"mine": 1, "seed": "x"}})
    assert error.param == "sampling_params.seed"


def test_logprobs_beside_selected_ids_may_be_their_number():
    assert parse(sampling_params={"logprobs": 2, "logprob_token_ids": [7, 7]}).sampling.logprobs == 2


# --- headers -----------------------------------------------------------------------------------------------------------------


def test_the_header_wins_over_the_bodys_request_id():
    assert parse(headers={"x-request-id": "head"}, request_id="body").id == "head"
    assert parse(headers={"x-request-id": ""}, request_id="body").id == "body"


def test_two_calls_without_an_id_get_two():
    assert parse().id != parse().id


@pytest.mark.parametrize("id_", ["x" * 257, "a\nb", "é", "a\0b"])
def test_an_id_that_no_header_carries_is_refused(id_):
    assert refused({**PLAIN, "request_id": id_}).param == "request_id"
    assert refused(PLAIN, {"x-request-id": id_}).param == "x-request-id"


def test_session_and_rank_come_from_their_headers():
    call = parse(headers={"x-session-id": "s", "x-data-parallel-rank": " 3 "})
    assert (call.session_id, call.data_parallel_rank) == ("s", 3)
    assert parse().data_parallel_rank is None


@pytest.mark.parametrize("rank", ["", "x", "-1", "1.5", "²", str(2**32), "9" * 5000])
def test_what_is_no_rank_is_refused(rank):
    assert refused(PLAIN, {"x-data-parallel-rank": rank}).param == "x-data-parallel-rank"


# --- anything at all ---------------------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
BODIES = st.dictionaries(st.sampled_from([*BODY_KEYS, "other"]), JSON, max_size=8)
SAMPLINGS = st.dictionaries(st.sampled_from([*SamplingParams.__struct_fields__, "other"]), JSON, max_size=8)


def is_a_call_or_a_bad_request(raw, headers=None):
    with suppress(BadRequest):
        assert isinstance(parse_call(raw, headers or {}), Call)


@given(BODIES, SAMPLINGS, st.booleans())
def test_any_json_is_a_call_or_a_bad_request(body, sampling, plain):
    is_a_call_or_a_bad_request(msgspec.json.encode({**PLAIN, **body, "sampling_params": sampling} if plain else body))


@given(JSON)
def test_any_value_in_any_known_place_is_a_call_or_a_bad_request(value):
    for key in BODY_KEYS:
        is_a_call_or_a_bad_request(msgspec.json.encode({**PLAIN, "stream": True, key: value}))
    for key in SamplingParams.__struct_fields__:
        is_a_call_or_a_bad_request(msgspec.json.encode({**PLAIN, "sampling_params": {key: value}}))


DEEP = b"[" * 5000 + b"]" * 5000


@settings(max_examples=300)
@given(st.binary(max_size=60))
@example(b'{"token_ids":[1],"sampling_params":{"foo":1e999}}')
@example(b'{"token_ids":[1],"sampling_params":{"vllm_xargs":{"a":' + DEEP + b"}}}")
@example(b'{"token_ids":[1],"sampling_params":{"foo":' + DEEP + b"}}")
@example(b'{"token_ids":[1],"sampling_params":{},"foo":' + DEEP + b"}")
@example(b'{"token_ids":[1],"sampling_params":{},"\xff":1}')
@example(b'{"token_ids":[1],"sampling_params":{"foo":"\xff"}}')
@example(b'{"token_ids":[1],"sampling_params":{"foo":"\\ud800"}}')
@example(b'{"token_ids":[1],"sampling_params":{"foo":' + b"9" * 5000 + b"}}")
@example(b'{"token_ids":[1],"sampling_params":{},"model":"\\ud83d\\ude00"}')
@example(b'{"token_ids":[1],"token_ids":[2],"sampling_params":{}}')
def test_any_bytes_are_a_call_or_a_bad_request(raw):
    is_a_call_or_a_bad_request(raw)
    is_a_call_or_a_bad_request(b'{"token_ids":[1],"sampling_params":{"a":' + raw + b"}}")
    is_a_call_or_a_bad_request(b'{"token_ids":[1],"sampling_params":{},"a":' + raw + b"}")


@given(st.dictionaries(st.sampled_from(["x-request-id", "x-data-parallel-rank", "x-session-id"]), st.text(max_size=12)))
@example({"x-data-parallel-rank": string.digits * 500})
def test_any_headers_are_a_call_or_a_bad_request(headers):
    is_a_call_or_a_bad_request(msgspec.json.encode(PLAIN), headers)


@pytest.mark.parametrize(
    ("key", "value"), [("repetition_penalty", 0), ("allowed_token_ids", []), ("structured_outputs", {"disable_any_whitespace": True})]
)
def test_what_grpc_would_take_for_not_said_is_refused_as_vllm_does_over_http(key, value):
    with pytest.raises(BadRequest) as raised:
        parse_call(msgspec.json.encode({"token_ids": [1], "sampling_params": {key: value}}), {})
    assert raised.value.param == f"sampling_params.{key}"
    assert key in raised.value.message
