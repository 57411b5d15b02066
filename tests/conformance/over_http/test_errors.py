"""Requests that are refused: status, error body, and the words that clients may look for."""

import pytest

from tests.conformance.over_http.test_generate import PATH, PROMPT, body
from tests.conformance.over_http.test_streams import events

SALT = "cache_salt"

#: What is wrong → (body, headers), and words of the message.
REFUSED = {
    "temperature": (body({"temperature": 3}), "temperature must be in [0, 2], got 3"),
    "top_p": (body({"top_p": 0}), "top_p must be in (0, 1], got 0"),
    "n": (body({"n": 2}), "Only n=1 is supported."),
    "logprobs": (body({"logprobs": 21}), "requested logprobs of 21, which is greater than max allowed: 20"),
    "max_tokens": (body({"max_tokens": 0}), "max_tokens must be greater than 0."),
    "min_tokens": (body({"min_tokens": 5}), "min_tokens=5"),
    "unknown model": (body({"model": "nope"}), "The model `nope` does not exist."),
    "empty prompt": (body({}, token_ids=[]), "token_ids must contain at least one token"),
    "unknown token": (body({}, token_ids=[99999]), "token_id(s) [99999] in prompt are out of vocabulary. Vocabulary size: 320"),
    "no room": (body({}, token_ids=[65] * 2048), "aximum context length is 2048 tokens"),
    "too long": (body({}, token_ids=[65] * 3000), "aximum context length is 2048 tokens"),
    "wrong type": (body({"max_tokens": "x"}), "Failed to deserialize the JSON body into the target type: "),
    "no sampling": ({"token_ids": PROMPT}, "Failed to deserialize the JSON body into the target type: "),
    "streamed prompt logprobs": (body({"prompt_logprobs": 0}, stream=True), "are not available when"),
    "count and selection": (body({"logprobs": 1, "logprob_token_ids": [1, 2]}), "logprob_token_ids"),
}
#: Checked since a version after 0.31.
LATER_REFUSED = {
    "stop": (body({"stop": ["a"]}), "stop is not supported."),
    "a salt with a slash": (body({SALT: "a/b"}), SALT),
    "an empty salt": (body({SALT: ""}), SALT),
    "a long salt": (body({SALT: "x" * 129}), SALT),
}
#: type of 0.33 → type and code of 0.31
OF_0_31 = {
    "BadRequestError": ("invalid_request_error", "invalid_request_error"),
    "NotFoundError": ("invalid_request_error", "model_not_found"),
    "Bad Request": ("invalid_request_error", "json_parse_error"),
}


def refused(client, sent):
    response = client.post(PATH, json=sent)
    assert response.headers["content-type"] == "application/json"
    reply = response.json()
    assert list(reply) == ["error"]
    assert list(reply["error"]) == ["message", "type", "param", "code"]
    return response.status_code, reply["error"]


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_has_the_body_of_0_33(measure, other, version, name):
    sent, words = REFUSED[name]
    (status, wanted), (other_status, got) = refused(measure, sent), refused(other, sent)
    assert other_status == status == wanted["code"]
    assert words in wanted["message"]
    if version >= (0, 33):
        assert words in got["message"]
        assert (got["type"], got["param"], got["code"]) == (wanted["type"], wanted["param"], wanted["code"])
    else:
        assert (got["type"], got["code"]) == OF_0_31[wanted["type"]]
        assert got["message"]


@pytest.mark.parametrize("name", LATER_REFUSED)
def test_what_0_31_let_pass_is_refused_by_0_33(measure, other, version, name):
    sent, words = LATER_REFUSED[name]
    status, wanted = refused(measure, sent)
    assert (status, words in wanted["message"]) == (400, True)
    if version >= (0, 33):
        other_status, got = refused(other, sent)
        assert (other_status, got["type"], got["param"], got["code"]) == (400, wanted["type"], wanted["param"], wanted["code"])
        assert words in got["message"]
    else:
        assert other.post(PATH, json=sent).status_code == 200


def test_what_is_no_json_is_a_bad_request(measure, other, version):
    for client, current in ((measure, True), (other, version >= (0, 33))):
        response = client.post(PATH, content=b"{", headers={"content-type": "application/json"})
        error = response.json()["error"]
        assert response.status_code == 400
        assert error["message"].startswith("Failed to parse the request body as JSON: ")
        assert (error["type"], error["code"]) == (("Bad Request", 400) if current else OF_0_31["Bad Request"])


def test_other_methods_and_paths_get_empty_answers(measure, other):
    for client in (measure, other):
        for path, status in ((PATH, 405), ("/nowhere", 404)):
            response = client.get(path)
            assert (response.status_code, response.content) == (status, b"")
            assert "content-type" not in response.headers


def test_a_rank_that_is_not_connected_is_refused_and_one_that_is_none_is_ignored(measure, other):
    for client in (measure, other):
        assert client.post(PATH, json=body({}), headers={"x-data-parallel-rank": "9"}).status_code == 400
        assert client.post(PATH, json=body({}), headers={"x-data-parallel-rank": "x"}).status_code == 200


def test_a_paused_worker_refuses_from_0_33_on_and_says_so_in_a_stream_that_has_begun(measure, other, version):
    message = "Generation is paused. Please retry after it resumes."
    error = {"message": message, "type": "ServiceUnavailableError", "param": None, "code": 503}
    for client in [measure, other][: 2 if version >= (0, 33) else 1]:
        client.post("/pause?mode=abort").raise_for_status()
        try:
            assert refused(client, body({})) == (503, error)
            assert events(client.post(PATH, json=body({}, stream=True))) == [{"error": error}]
        finally:
            client.post("/resume").raise_for_status()


def test_an_engine_failure_is_a_finish_reason_or_an_event(measure):
    sent = body({"max_tokens": 9}, token_ids=[4, 2])
    choice = measure.post(PATH, json=sent).json()["choices"][0]
    assert (choice["finish_reason"], len(choice["token_ids"])) == ("error", 2)
    *tokens, last = events(measure.post(PATH, json=sent | {"stream": True}))
    assert [len(chunk["choices"][0]["token_ids"]) for chunk in tokens] == [1, 1]
    assert last == {"error": {"message": "Internal server error", "type": "InternalServerError", "param": None, "code": 500}}
