"""Which wire a call takes, and what becomes of one that no wire carries."""

import pytest

from tests.conformance.through_headrace.calls import PATH, body, events, refusal
from tests.conformance.through_headrace.conftest import client_of
from tests.conformance.through_headrace.test_lowering import GRPC_ONLY, HTTP_ONLY

STOP = {"stop": "a"}
HAND_OVER = {"do_remote_decode": True, "do_remote_prefill": False}
INCLUDED = {"stop": "a", "include_stop_str_in_output": True}


def wire_of(proxy, sent):
    """The wire that a call took, as the log has it."""
    with client_of(proxy) as client:
        response = client.post(PATH, json=sent)
        assert response.status_code == 200, response.text
        return proxy.settled(response.headers["x-request-id"])["wire"]


@pytest.mark.parametrize("sampling", [{}, {"logprobs": 2}, {"prompt_logprobs": 1}, STOP, INCLUDED])
def test_calls_go_over_grpc(proxy, sampling):
    assert wire_of(proxy, body(sampling=sampling)) == "grpc"


@pytest.mark.parametrize("name", HTTP_ONLY)
def test_what_grpc_has_no_field_for_goes_over_http(scripted_proxy, name):
    assert wire_of(scripted_proxy, body(sampling=HTTP_ONLY[name][0])) == "http"


@pytest.mark.parametrize("name", GRPC_ONLY)
def test_what_http_cant_carry_goes_over_grpc(scripted_proxy, name):
    assert wire_of(scripted_proxy, body(sampling=GRPC_ONLY[name][0])) == "grpc"


def test_without_grpc_everything_else_goes_over_http(over_http):
    assert wire_of(over_http, body(sampling={"logprobs": 2, "prompt_logprobs": 1})) == "http"


@pytest.mark.parametrize("name", HTTP_ONLY)
def test_without_http_what_needs_it_is_refused_by_name(over_grpc, name):
    key = f"sampling_params.{name}"
    with client_of(over_grpc) as client:
        status, error = refusal(client, body(sampling=HTTP_ONLY[name][0]))
    assert (status, key in error["message"], error["type"]) == (400, True, "BadRequestError")
    assert error["param"] in {f"sampling_params.{given}" for given in HTTP_ONLY[name][0]}


@pytest.mark.parametrize(
    ("sent", "name"),
    [
        (body(sampling=STOP), "sampling_params.stop"),
        (body(sampling=GRPC_ONLY["logit_bias"][0]), "sampling_params.logit_bias"),
        (body(sampling={"prompt_logprobs": 1}, stream=True), "sampling_params.prompt_logprobs"),
        (body(kv_transfer_params=HAND_OVER, stream=True), "kv_transfer_params.do_remote_decode"),
    ],
)
def test_without_grpc_what_needs_it_is_refused_by_name(over_http, sent, name):
    with client_of(over_http) as client:
        status, error = refusal(client, sent)
    assert (status, name in error["message"], error["param"]) == (400, True, name)


def test_a_streamed_hand_over_is_told_over_grpc(scripted_client, scripted_proxy):
    sent = body(kv_transfer_params=HAND_OVER, stream=True)
    assert wire_of(scripted_proxy, sent) == "grpc"
    told = [chunk["kv_transfer_params"] for chunk in events(scripted_client, sent) if "kv_transfer_params" in chunk]
    assert [params["do_remote_prefill"] for params in told] == [True]


@pytest.mark.parametrize("field", ["kv_transfer_params", "ec_transfer_params", "reasoning_parser_kwargs"])
def test_integers_that_grpc_would_change_go_over_http(scripted_proxy, over_grpc, field):
    given = {"a": [2**53 + 1]}
    sent = body() | {field: {"chat_template_kwargs": given} if field == "reasoning_parser_kwargs" else given}
    assert wire_of(scripted_proxy, sent) == "http"
    with client_of(over_grpc) as client:
        status, error = refusal(client, sent)
    assert (status, error["param"]) == (400, field)


def test_without_http_content_parts_are_refused_by_name(over_grpc):
    with client_of(over_grpc) as client:
        status, error = refusal(client, body(content_parts=[{"type": "image_url", "url": "data:image/png;base64,AAAA"}]))
    message = "no worker can serve content_parts (needs the Python HTTP server or the Rust HTTP server)"
    assert (status, error["message"], error["param"]) == (400, message, "content_parts")


def test_two_needs_that_no_single_wire_serves_are_refused_by_name(scripted_client):
    status, error = refusal(scripted_client, body(sampling=STOP | {"bad_words": ["a"]}))
    assert status == 400
    assert "sampling_params.stop" in error["message"]
    assert "sampling_params.bad_words" in error["message"]


def test_what_no_server_here_can_do_is_refused_by_name(scripted_client):
    status, error = refusal(scripted_client, body(sampling={"trace_decode_token_ids": [1]}))
    assert (status, error["param"]) == (400, "sampling_params.trace_decode_token_ids")
