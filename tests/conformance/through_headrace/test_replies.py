"""What a client gets back from a unary call."""

from tests.conformance.through_headrace.calls import PROMPT, body, reply


def test_a_reply_has_vllms_keys_and_says_what_it_cost(client, worker):
    answer = reply(client, body(sampling={"max_tokens": 5}))
    assert {
        "request_id",
        "model",
        "created",
        "choices",
        "usage",
        "prompt_logprobs",
        "prompt_token_ids",
        "kv_transfer_params",
    } <= answer.keys()
    assert (answer["model"], answer["usage"]["prompt_tokens"]) == (worker.model, len(PROMPT))
    assert (answer["usage"]["completion_tokens"], answer["usage"]["total_tokens"]) == (5, len(PROMPT) + 5)
    (choice,) = answer["choices"]
    assert (choice["index"], choice["finish_reason"], choice["stop_reason"], len(choice["token_ids"])) == (0, "length", None, 5)


def test_the_request_id_is_the_clients(client):
    response = client.post("/inference/v1/generate", json=body(request_id="mine"), headers={"x-request-id": "header"})
    assert (response.json()["request_id"], response.headers["x-request-id"]) == ("header", "header")
    assert reply(client, body(request_id="mine"))["request_id"] == "mine"
    assert reply(client, body())["request_id"]


def test_the_reply_says_where_it_came_from(client):
    response = client.post("/inference/v1/generate", json=body())
    assert (response.headers["x-headrace-worker"], response.headers["x-headrace-route"]) == ("w0", "round-robin")


def test_cached_tokens_are_told_where_the_worker_tells_them(client, version):
    prompt = [*range(36, 236), 44]
    details = [reply(client, body(prompt=prompt))["usage"]["prompt_tokens_details"] for _ in range(2)]
    assert details == ([{"cached_tokens": 0}, {"cached_tokens": 192}] if version >= (0, 33) else [None, None])


def test_logprobs_come_with_ranks_on_every_worker(client):
    answer = reply(client, body(sampling={"logprobs": 3, "temperature": 1.0, "seed": 3, "max_tokens": 12}))
    for entry in answer["choices"][0]["logprobs"]["content"]:
        top = entry["top_logprobs"]
        assert (top[0]["token_id"], top[0]["logprob"], top[0]["rank"]) == (entry["token_id"], entry["logprob"], entry["rank"])
        assert len({candidate["token_id"] for candidate in top}) == len(top) == (3 if entry["rank"] <= 3 else 4)
        assert [candidate["rank"] for candidate in top[1:]] == [rank for rank in (1, 2, 3) if rank != entry["rank"]]


def test_a_selection_of_candidates_is_enough(client):
    answer = reply(client, body(sampling={"logprob_token_ids": [70, 71]}))
    for entry in answer["choices"][0]["logprobs"]["content"]:
        assert [candidate["token_id"] for candidate in entry["top_logprobs"][1:]] == [70, 71]


def test_prompt_logprobs_have_the_prompts_own_token_first(client):
    first, *others = reply(client, body(sampling={"prompt_logprobs": 3}))["prompt_logprobs"]
    assert first is None
    assert [next(iter(entry)) for entry in others] == [str(token) for token in PROMPT[1:]]
    assert all(len(entry) in (3, 4) for entry in others)
    assert all(entry[str(token)]["logprob"] < 0 for token, entry in zip(PROMPT[1:], others, strict=True))


def test_a_prompt_of_one_token_has_no_logprob(client):
    assert reply(client, body(prompt=[65], sampling={"prompt_logprobs": 1}))["prompt_logprobs"] == [None]


def test_the_prompt_comes_back_when_asked_for(client):
    assert reply(client, body(return_token_ids=True))["prompt_token_ids"] == PROMPT
    assert reply(client, body())["prompt_token_ids"] is None


def test_a_stop_id_is_named(client):
    output = reply(client, body(sampling={"max_tokens": 9}))["choices"][0]["token_ids"]
    choice = reply(client, body(sampling={"max_tokens": 9, "stop_token_ids": [output[4]]}))["choices"][0]
    assert choice["token_ids"] == output[: output.index(output[4]) + 1]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", output[4])


def test_n_outputs_have_seeds_that_follow_one_another(client):
    sampling = {"temperature": 1.0, "max_tokens": 12}
    choices = reply(client, body(sampling=sampling | {"n": 3, "seed": 40}))["choices"]
    single = [reply(client, body(sampling=sampling | {"seed": seed}))["choices"][0] for seed in (40, 41, 42)]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert [choice["token_ids"] for choice in choices] == [choice["token_ids"] for choice in single]
    assert len({tuple(choice["token_ids"]) for choice in choices}) == 3


def test_n_outputs_count_their_prompt_once(client):
    usage = reply(client, body(sampling={"n": 3}))["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (len(PROMPT), 12, len(PROMPT) + 12)


def test_connector_parameters_come_back_with_their_integers(client, worker):
    answer = reply(client, body(sampling={"max_tokens": 1}, kv_transfer_params={"do_remote_decode": True, "remote_port": None}))
    params = answer["kv_transfer_params"]
    if worker.kind == "engine":
        assert params is None, "this engine has no connector"
        return
    assert (params["do_remote_prefill"], params["remote_block_ids"], params["tp_size"]) == (True, [[0]], 1)
    assert type(params["remote_port"]) is int
    assert reply(client, body(kv_transfer_params=params))["choices"][0]["finish_reason"] == "length"


def test_the_model_can_be_named(client, worker):
    assert reply(client, body(model=worker.model))["model"] == worker.model
