"""What of a call reaches the engine, over each wire."""

import httpx
import pytest

from tests import workers
from tests.conformance.through_headrace.calls import PROMPT, body, reply
from tests.conformance.through_headrace.conftest import BARE, client_of
from tests.proxy import headrace

#: `sampling_params` → what the engine gets. These go over both wires.
BOTH = {
    "temperature": ({"temperature": 0.5}, {"temperature": 0.5}),
    "top_p": ({"top_p": 0.5}, {"top_p": 0.5}),
    "top_k": ({"top_k": 7}, {"top_k": 7}),
    "top_k of all": ({"top_k": -1}, {"top_k": 0}),
    "min_p": ({"min_p": 0.25}, {"min_p": 0.25}),
    "seed": ({"seed": -7}, {"seed": -7}),
    "seed 0": ({"seed": 0}, {"seed": 0}),
    "max_tokens": ({"max_tokens": 3}, {"max_tokens": 3}),
    "min_tokens": ({"min_tokens": 2}, {"min_tokens": 2}),
    "stop_token_ids": ({"stop_token_ids": [300]}, {"stop_token_ids": [300]}),
    "ignore_eos": ({"ignore_eos": True}, {"_eos_token_id": None}),
    "eos": ({"ignore_eos": False}, {"_eos_token_id": 319}),
    "thinking_token_budget": ({"thinking_token_budget": 3}, {"thinking_token_budget": 3}),
    "presence_penalty": ({"presence_penalty": 0.5}, {"presence_penalty": 0.5}),
    "frequency_penalty": ({"frequency_penalty": -0.5}, {"frequency_penalty": -0.5}),
    "repetition_penalty": ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
    "allowed_token_ids": ({"allowed_token_ids": [65, 66]}, {"allowed_token_ids": [65, 66]}),
    "bad_words_token_ids": ({"bad_words_token_ids": [[70, 71]]}, {"_bad_words_token_ids": [[70, 71]]}),
    "logprobs": ({"logprobs": 4}, {"logprobs": 4}),
    "logprobs 0": ({"logprobs": 0}, {"logprobs": 0}),
    "logprob_token_ids": ({"logprob_token_ids": [70, 71]}, {"logprob_token_ids": [70, 71]}),
    "prompt_logprobs": ({"prompt_logprobs": 2}, {"prompt_logprobs": 2}),
    "skip_reading_prefix_cache": ({"skip_reading_prefix_cache": True}, {"skip_reading_prefix_cache": True}),
    "watermarking": ({"watermarking": False}, {"watermarking": False}),
}
STRUCTURED = {
    "json": ({"json": {"type": "object"}}, ("json", {"type": "object"})),
    "regex": ({"regex": "a+"}, ("regex", "a+")),
    "choice": ({"choice": ["yes", "no"]}, ("choice", ["yes", "no"])),
    "grammar": ({"grammar": 'root ::= "a"'}, ("grammar", 'root ::= "a"')),
    "json_object": ({"json_object": True}, ("json_object", True)),
}
#: Only gRPC has these.
GRPC_ONLY = {"logit_bias": ({"logit_bias": {"65": 2.5, "66": 500}}, {"logit_bias": {"65": 2.5, "66": 100.0}})}
#: Only HTTP has these. A bad word is banned with and without a space before it: 276 is " a".
HTTP_ONLY = {
    "vllm_xargs": ({"vllm_xargs": {"house": "rule"}}, {"extra_args": {"house": "rule"}}),
    "extra_args": ({"extra_args": {"house": "rule"}}, {"extra_args": {"house": "rule"}}),
    "routed_experts_prompt_start": ({"routed_experts_prompt_start": 2}, {"routed_experts_prompt_start": 2}),
    "bad_words": ({"bad_words": ["ab"]}, {"_bad_words_token_ids": [[97, 98], [276, 98]]}),
    "repetition_detection": (
        {"repetition_detection": {"max_pattern_size": 4, "min_pattern_size": 1, "min_count": 3}},
        {"repetition_detection": {"max_pattern_size": 4, "min_pattern_size": 1, "min_count": 3}},
    ),
    "stream_interval": ({"stream_interval": 2}, {}),
    "prompt_logprob_token_ids": ({"prompt_logprob_token_ids": [[65, 66]] * 8}, {}),
    "prompt_logprob_start": ({"prompt_logprob_start": 6, "prompt_logprob_token_ids": [[65, 66]] * 2}, {"prompt_logprob_start": 6}),
}


@pytest.fixture(params=["over_grpc", "over_http"])
def wire(request):
    """A headrace that knows one wire of the scripted worker."""
    with client_of(request.getfixturevalue(request.param)) as client:
        yield client


def added(worker, client: httpx.Client, sent, **headers):
    """The request as the engine got it."""
    since = len(worker.engine_events())
    reply(client, sent, **headers)
    return worker.wait_for_event("add", since=since)


@pytest.mark.parametrize("name", BOTH)
def test_a_sampling_parameter_reaches_the_engine_over_either_wire(wire, scripted_worker, name):
    given, taken = BOTH[name]
    sampling = added(scripted_worker, wire, body(sampling=given))["sampling_params"]
    for key, value in taken.items():
        if isinstance(value, list) and key == "stop_token_ids":
            assert set(value) <= set(sampling[key])
        else:
            assert sampling.get(key) == value


@pytest.mark.parametrize("name", STRUCTURED)
def test_structured_output_reaches_the_engine_over_either_wire(wire, scripted_worker, name):
    given, (kind, value) = STRUCTURED[name]
    structured = added(scripted_worker, wire, body(sampling={"structured_outputs": given}))["sampling_params"]["structured_outputs"]
    assert structured[kind] == value


@pytest.mark.parametrize("name", GRPC_ONLY)
def test_what_only_grpc_has_reaches_the_engine(scripted_client, scripted_worker, name):
    given, taken = GRPC_ONLY[name]
    sampling = added(scripted_worker, scripted_client, body(sampling=given))["sampling_params"]
    assert {key: sampling[key] for key in taken} == taken


@pytest.mark.parametrize("name", HTTP_ONLY)
def test_what_only_http_has_reaches_the_engine(scripted_client, scripted_worker, name):
    given, taken = HTTP_ONLY[name]
    sampling = added(scripted_worker, scripted_client, body(sampling=given))["sampling_params"]
    assert {key: sampling[key] for key in taken} == taken


def test_what_is_omitted_means_the_same_over_either_wire(wire, scripted_worker):
    sampling = added(scripted_worker, wire, {"token_ids": PROMPT, "sampling_params": {}})["sampling_params"]
    assert (sampling["temperature"], sampling["max_tokens"]) == (1.0, scripted_worker.max_model_len - len(PROMPT))
    nothing = ("seed", "logprobs", "prompt_logprobs", "structured_outputs", "thinking_token_budget", "logit_bias")
    assert {key: sampling.get(key) for key in nothing} == dict.fromkeys(nothing)


def test_an_explicit_zero_counts_more_than_what_the_model_says():
    said = {"presence_penalty": 1.5, "frequency_penalty": 0.7, "repetition_penalty": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.05}
    neutral = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    with workers.scripted(generation_config=said) as worker:
        for wires in ("grpc", "http"):
            with headrace(worker, wires=wires, settings=BARE) as proxy, client_of(proxy) as client:
                for sampling, taken in (({}, said), (neutral, neutral)):
                    sent = added(worker, client, body(sampling=sampling))["sampling_params"]
                    assert {key: sent[key] for key in said} == pytest.approx(taken, abs=1e-6)


def test_a_cache_that_may_be_read_for_prompt_logprobs_is_told_to_the_engine(scripted_client, scripted_worker):
    sampling = {"prompt_logprobs": 1, "skip_reading_prefix_cache": False}
    assert added(scripted_worker, scripted_client, body(sampling=sampling))["sampling_params"]["skip_reading_prefix_cache"] is False


def test_who_asks_reaches_the_engine_over_either_wire(wire, scripted_worker):
    sent = body(cache_salt="v7", priority=-3, request_id="who", model="tiny")
    event = added(scripted_worker, wire, sent, x_session_id="s1", x_data_parallel_rank="0")
    assert event["request_id"].startswith("who-")
    assert (event["cache_salt"], event["priority"], event["session_id"]) == ("v7", -3, "s1")


def test_the_reasoning_gate_reaches_the_engine_over_either_wire(wire, scripted_worker):
    kwargs = {"chat_template_kwargs": {"thinking": True}}
    event = added(scripted_worker, wire, body(reasoning_ended=False, reasoning_parser_kwargs=kwargs))
    assert (event["reasoning_ended"], event["reasoning_parser_kwargs"]) == (False, kwargs)


def test_connector_parameters_reach_the_engine_with_their_integers(wire, scripted_worker):
    given = {"remote_engine": "e", "remote_port": 5600, "large": 2**53 - 1, "half": 0.5, "none": None, "list": [1, [2]]}
    sent = body(kv_transfer_params=given, ec_transfer_params={"step": 3})
    extra = added(scripted_worker, wire, sent)["sampling_params"]["extra_args"]
    assert extra == {"kv_transfer_params": given, "ec_transfer_params": {"step": 3}}
    assert type(extra["kv_transfer_params"]["remote_port"]) is int


def test_outputs_of_one_call_have_ids_and_seeds_of_their_own(wire, scripted_worker):
    since = len(scripted_worker.engine_events())
    reply(wire, body(request_id="many", sampling={"n": 3, "seed": 5}))
    events = [event for event in scripted_worker.engine_events()[since:] if event["event"] == "add"]
    assert sorted(event["request_id"].rpartition("-")[0] for event in events) == ["many-0", "many-1", "many-2"]
    assert sorted(event["sampling_params"]["seed"] for event in events) == [5, 6, 7]


def test_stop_strings_end_the_output(over_grpc):
    with client_of(over_grpc) as client:
        prompt = [19, *b"abcdefgh"]
        for stop in ("cd", ["zz", "cd"]):
            choice = reply(client, body(prompt=prompt, sampling={"max_tokens": 8, "stop": stop}))["choices"][0]
            assert (bytes(choice["token_ids"]), choice["finish_reason"], choice["stop_reason"]) == (b"abcd", "stop", "cd")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_call_goes_to_the_rank_that_it_names(rank):
    with workers.scripted(data_parallel_size=2) as worker, headrace(worker) as proxy, client_of(proxy) as client:
        for sampling in ({}, {"bad_words": ["a"]}):
            assert added(worker, client, body(sampling=sampling), x_data_parallel_rank=str(rank))["rank"] == rank
