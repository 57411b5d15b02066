"""`POST /inference/v1/generate`: the reply's keys, in their order, and what stands in them."""

import pytest

from tests.conformance.over_http.shapes import as_0_31, shape, without_counts

PATH = "/inference/v1/generate"
PROMPT = list(b"Hello, w!")
SAMPLING = {"temperature": 0.0, "max_tokens": 3, "ignore_eos": True}

REPLIES = {
    "plain": {},
    "its own request id": {"request_id": "r1"},
    "the model by its name": {"model": "tiny"},
    "the prompt repeated": {"return_token_ids": True},
    "logprobs alone": {"logprobs": 0},
    "one candidate": {"logprobs": 1},
    "five candidates": {"logprobs": 5},
    "selected candidates": {"logprobs": 2, "logprob_token_ids": [70, 71]},
    "selected candidates without a count": {"logprob_token_ids": [70, 71]},
    "prompt logprobs": {"prompt_logprobs": 0},
    "prompt logprobs with candidates": {"prompt_logprobs": 2},
    "everything at once": {"logprobs": 3, "prompt_logprobs": 1, "return_token_ids": True},
    "a salt": {"cache_salt": "v7"},
    "connector parameters that ask for nothing": {"kv_transfer_params": {"do_remote_decode": False}},
    "keys that nobody knows": {"surprise": 1},
}
OF_BODY = {"request_id", "model", "return_token_ids", "cache_salt", "kv_transfer_params", "surprise"}


def body(fields, **more):
    """A body with `fields`, each where it belongs."""
    outer = {key: value for key, value in fields.items() if key in OF_BODY}
    inner = {key: value for key, value in fields.items() if key not in OF_BODY}
    return {"token_ids": PROMPT, "sampling_params": SAMPLING | inner} | outer | more


def expected(reply, version):
    """The shape that a reply of 0.33 has in that version."""
    return shape(reply) if version >= (0, 33) else as_0_31(shape(reply))


def actual(reply, version):
    return shape(reply) if version >= (0, 33) else without_counts(shape(reply))


@pytest.mark.parametrize("name", REPLIES)
def test_a_reply_has_the_keys_of_0_33_in_their_order(measure, other, version, name):
    wanted = measure.post(PATH, json=body(REPLIES[name]))
    got = other.post(PATH, json=body(REPLIES[name]))
    assert (got.status_code, wanted.status_code) == (200, 200)
    assert got.headers["content-type"] == wanted.headers["content-type"] == "application/json"
    assert actual(got.json(), version) == expected(wanted.json(), version)


def test_the_request_id_is_the_clients_and_the_header_wins(measure, other):
    for client in (measure, other):
        assert client.post(PATH, json=body({"request_id": "mine"})).json()["request_id"] == "mine"
        reply = client.post(PATH, json=body({"request_id": "mine"}), headers={"x-request-id": "header"})
        assert reply.json()["request_id"] == "header"
        assert len(client.post(PATH, json=body({})).json()["request_id"]) == 8


def test_the_stop_id_is_told_from_0_33_on(measure, other, version):
    for client, current in ((measure, True), (other, version >= (0, 33))):
        tokens = client.post(PATH, json=body({"max_tokens": 9})).json()["choices"][0]["token_ids"]
        choice = client.post(PATH, json=body({"max_tokens": 9, "stop_token_ids": [tokens[4]]})).json()["choices"][0]
        assert choice["token_ids"] == tokens[: tokens.index(tokens[4]) + 1]
        assert (choice["finish_reason"], choice.get("stop_reason")) == ("stop", tokens[4] if current else None)


def test_a_weight_version_covers_the_output_from_0_33_on(measure, other, version):
    for client, current in ((measure, True), (other, version >= (0, 33))):
        choice = client.post(PATH, json=body({})).json()["choices"][0]
        assert choice.get("weight_versions") == ([{"version": "default", "start": 0, "end": 3}] if current else None)


def test_the_sampled_token_leads_its_candidates(measure, other, version):
    tempered = {"temperature": 1.0, "seed": 5, "max_tokens": 16, "logprobs": 4}
    for client, current in ((measure, True), (other, version >= (0, 33))):
        for entry in client.post(PATH, json=body(tempered)).json()["choices"][0]["logprobs"]["content"]:
            top = entry["top_logprobs"]
            assert (top[0]["logprob"], top[0].get("token_id"), top[0].get("token")) == (
                entry["logprob"],
                entry.get("token_id"),
                entry.get("token"),
            )
            if current:
                assert len(top) == (4 if entry["rank"] <= 4 else 5)
                assert len({candidate["token_id"] for candidate in top}) == len(top)
            else:
                assert len(top) == 5, "the sampled token, and then the best four whether it is among them or not"


def test_the_same_request_gives_the_same_tokens(measure, other):
    for client in (measure, other):
        first, second = (client.post(PATH, json=body({"max_tokens": 20})).json()["choices"][0]["token_ids"] for _ in range(2))
        assert first == second
