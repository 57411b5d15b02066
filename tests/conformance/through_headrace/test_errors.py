"""What a client is told when a call goes wrong: vLLM's statuses, bodies and words."""

import pytest

from tests import workers
from tests.conformance.through_headrace.calls import PATH, body, events, refusal, reply
from tests.conformance.through_headrace.conftest import client_of
from tests.proxy import headrace

INTERNAL = {"message": "engine failed during generation", "type": "InternalServerError", "param": None, "code": 500}


@pytest.fixture(params=["over_grpc", "over_http"])
def wire(request):
    """A headrace that knows one wire of the scripted worker."""
    with client_of(request.getfixturevalue(request.param)) as client:
        yield client


@pytest.mark.parametrize("length", [2048, 3000])
@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_is_a_400_in_vllms_words(client, length, stream):
    status, error = refusal(client, body(prompt=[65] * length, stream=stream))
    assert (status, error["type"]) == (400, "BadRequestError")
    # Trainers look for this phrase, to drop the rollout instead of trying again.
    assert "maximum context length is 2048 tokens" in error["message"]
    assert str(length) in error["message"]


def test_an_unknown_model_is_a_404(client):
    status, error = refusal(client, body(model="nope"))
    assert (status, error["type"], error["param"]) == (404, "NotFoundError", "model")
    assert "The model `nope` does not exist." in error["message"]


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        ({"temperature": 3}, "temperature must be in [0, 2], got 3"),
        ({"top_p": 2}, "top_p must be in (0, 1], got 2"),
        ({"logprobs": 21}, "requested logprobs of 21"),
        ({"min_tokens": 9}, "min_tokens=9"),
        ({"stop_token_ids": [320]}, "320"),
    ],
)
def test_a_value_that_the_worker_refuses_is_a_400_in_its_words(client, sampling, words):
    status, error = refusal(client, body(sampling=sampling))
    assert (status, error["type"]) == (400, "BadRequestError")
    assert words in error["message"]


@pytest.mark.parametrize(
    ("sent", "param"),
    [
        ({"sampling_params": {}}, "token_ids"),
        (body(prompt=[]), "token_ids"),
        (body(sampling={"max_tokens": 0}), "sampling_params.max_tokens"),
        (body(sampling={"max_tokens": "x"}), "sampling_params.max_tokens"),
        (body(sampling={"tempreature": 1}), "sampling_params.tempreature"),
        (body(surprise=1), "surprise"),
        (body(sampling={"logprobs": 1, "logprob_token_ids": [1, 2]}), "sampling_params.logprobs"),
    ],
)
def test_a_body_that_is_wrong_in_itself_is_a_400_that_names_the_field(client, sent, param):
    status, error = refusal(client, sent)
    assert (status, error["param"]) == (400, param)
    assert param.rpartition(".")[2] in error["message"]


def test_what_is_no_json_is_a_400(client):
    response = client.post(PATH, content=b"{", headers={"content-type": "application/json"})
    assert (response.status_code, response.json()["error"]["code"]) == (400, 400)


def test_other_methods_are_a_405(client):
    response = client.get(PATH)
    assert (response.status_code, response.headers["allow"]) == (405, "POST")


def test_an_engine_failure_is_a_500_over_either_wire(wire):
    assert refusal(wire, body(prompt=[4, 2])) == (500, INTERNAL)
    assert refusal(wire, body(prompt=[4, 0])) == (500, INTERNAL)


def test_an_engine_that_refuses_a_call_makes_a_400_over_either_wire(wire):
    for stream in (False, True):
        status, error = refusal(wire, body(prompt=[2], stream=stream))
        assert (status, error["message"]) == (400, "scripted validation error")


def test_a_stream_that_fails_before_its_first_token_has_a_status(wire):
    status, error = refusal(wire, body(prompt=[4, 0], stream=True))
    assert (status, error["type"]) == (500, "InternalServerError")


def test_a_stream_that_fails_later_ends_with_the_error_as_an_event(wire):
    *chunks, last = events(wire, body(prompt=[4, 2]))
    assert [len(chunk["choices"][0]["token_ids"]) for chunk in chunks] == [1, 1]
    assert (last["error"]["code"], last["error"]["type"]) == (500, "InternalServerError")


def test_no_number_and_no_rank_are_written_as_vllm_writes_them(wire):
    choice = reply(wire, body(prompt=[7], sampling={"logprobs": 0}))["choices"][0]
    assert [(entry["logprob"], entry["rank"]) for entry in choice["logprobs"]["content"]] == [(-9999.0, None)] * 4


def test_a_rank_that_is_not_there_is_a_400(client):
    assert refusal(client, body(), x_data_parallel_rank="7")[0] == 400
    assert refusal(client, body(), x_data_parallel_rank="x")[0] == 400


def test_a_body_over_the_limit_is_a_413():
    with workers.stand_in() as worker, headrace(worker, settings="[server]\nmax_body_mib = 1") as proxy, client_of(proxy) as client:
        status, error = refusal(client, body(prompt=[65] * 2**20))
    assert (status, "max_body_mib" in error["message"]) == (413, True)
