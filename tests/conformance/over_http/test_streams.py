"""`POST /inference/v1/generate` as server-sent events: framing, and the keys of each chunk."""

import json

import pytest

from tests.conformance.over_http.test_generate import PATH, actual, body, expected

STREAMS = {
    "plain": {},
    "one candidate": {"logprobs": 1},
    "three candidates": {"logprobs": 3},
    "the prompt repeated": {"return_token_ids": True},
}
OPTIONS = {
    "without usage": None,
    "usage at the end": {"include_usage": True},
    "usage everywhere": {"include_usage": True, "continuous_usage_stats": True},
}


def events(response):
    """The data of each event; the framing is checked on the way."""
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream"
    *blocks, end = response.text.split("\n\n")
    assert end == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    *chunks, done = [block.removeprefix("data: ") for block in blocks]
    assert done == "[DONE]"
    return [json.loads(chunk) for chunk in chunks]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", STREAMS)
def test_each_chunk_has_the_keys_of_0_33_in_their_order(measure, other, version, name, options):
    more = {"request_id": "r1", "stream": True} | ({"stream_options": OPTIONS[options]} if OPTIONS[options] else {})
    wanted, got = (events(client.post(PATH, json=body(STREAMS[name], **more))) for client in (measure, other))
    assert [actual(chunk, version) for chunk in got] == [expected(chunk, version) for chunk in wanted]


def test_a_stream_has_the_tokens_of_the_unary_reply(other):
    whole = other.post(PATH, json=body({"max_tokens": 30})).json()["choices"][0]["token_ids"]
    chunks = events(other.post(PATH, json=body({"max_tokens": 30}, stream=True)))
    assert [token for chunk in chunks for choice in chunk["choices"] for token in choice["token_ids"]] == whole
    assert [len(chunk["choices"][0]["token_ids"]) for chunk in chunks] == [1] * 30


def test_usage_adds_up(measure, other):
    for client in (measure, other):
        *chunks, last = events(client.post(PATH, json=body({}, stream=True, stream_options=OPTIONS["usage everywhere"])))
        assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3]
        assert last["choices"] == []
        assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"], last["usage"]["total_tokens"]) == (9, 3, 12)
