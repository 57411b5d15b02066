"""What a client gets back from a streamed call."""

from tests.conformance.through_headrace.calls import PROMPT, body, events, reply, tokens


def test_a_stream_has_the_tokens_of_the_unary_reply(client):
    sampling = {"max_tokens": 40, "temperature": 1.0, "seed": 9, "logprobs": 1}
    chunks = events(client, body(sampling=sampling, request_id="s"))
    whole = reply(client, body(sampling=sampling))["choices"][0]
    assert tokens(chunks) == whole["token_ids"]
    assert [entry for chunk in chunks for entry in chunk["choices"][0]["logprobs"]["content"]] == whole["logprobs"]["content"]
    assert {chunk["request_id"] for chunk in chunks} == {"s"}
    finishes = [chunk["choices"][0].get("finish_reason") for chunk in chunks]
    assert finishes == [None] * (len(chunks) - 1) + ["length"]


def test_usage_comes_when_it_is_asked_for(client):
    assert not any("usage" in chunk for chunk in events(client, body()))
    *_, last = events(client, body(stream_options={"include_usage": True}))
    assert last["choices"] == []
    usage = last["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (len(PROMPT), 4, len(PROMPT) + 4)
    chunks = events(client, body(stream_options={"include_usage": True, "continuous_usage_stats": True}))
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 4, 4]


def test_what_is_said_of_the_prompt_comes_first(client):
    first, *others = events(client, body(return_token_ids=True, sampling={"prompt_logprobs": 1}))
    assert first["prompt_token_ids"] == PROMPT
    assert [next(iter(entry)) for entry in first["prompt_logprobs"][1:]] == [str(token) for token in PROMPT[1:]]
    assert not any("prompt_token_ids" in chunk or "prompt_logprobs" in chunk for chunk in others)


def test_n_outputs_come_side_by_side(client):
    sampling = {"n": 3, "seed": 50, "temperature": 1.0, "max_tokens": 8}
    chunks = events(client, body(sampling=sampling))
    whole = reply(client, body(sampling=sampling))["choices"]
    assert [tokens(chunks, index) for index in range(3)] == [choice["token_ids"] for choice in whole]


def test_connector_parameters_come_with_the_last_chunk(client, worker):
    *_, last = events(client, body(sampling={"max_tokens": 2}, kv_transfer_params={"do_remote_decode": True}))
    if worker.kind == "engine":
        assert "kv_transfer_params" not in last
    else:
        assert last["kv_transfer_params"]["remote_port"] > 0
