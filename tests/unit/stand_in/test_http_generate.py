"""`/inference/v1/generate`: replies, streams and error bodies in the form of vllm-rs 0.33.0."""

import json
import math
from typing import Any

import pytest

from tests.unit.stand_in.serving import Worker, body, over_asyncio, request, worker

GENERATE = "/inference/v1/generate"


async def events(stand_in: Worker, **fields: Any) -> list[Any]:
    response = await stand_in.post(GENERATE, body(stream=True, **fields))
    assert response.headers["content-type"] == "text/event-stream"
    *chunks, done, end = response.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]


@over_asyncio
async def test_a_whole_reply_has_every_key():
    async with worker() as stand_in:
        reply = await stand_in.generate_http(body(request_id="mine"))
        tokens = await stand_in.tokens(request())
        assert reply == {
            "request_id": "mine",
            "choices": [
                {
                    "index": 0,
                    "logprobs": None,
                    "finish_reason": "length",
                    "stop_reason": None,
                    "token_ids": tokens,
                    "routed_experts": None,
                    "sampling_mask": None,
                    "weight_versions": [{"version": "default", "start": 0, "end": 4}],
                }
            ],
            "prompt_logprobs": None,
            "prompt_token_id_logprobs": None,
            "prompt_token_ids": None,
            "mm_placeholders": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }


@over_asyncio
async def test_the_id_of_the_header_wins_and_without_any_there_are_eight_hex_digits():
    async with worker() as stand_in:
        response = await stand_in.http.post(GENERATE, json=body(request_id="body"), headers={"X-Request-Id": "header"})
        assert response.json()["request_id"] == "header"
        drawn = (await stand_in.generate_http(body()))["request_id"]
        assert len(drawn) == 8
        int(drawn, 16)


@over_asyncio
async def test_the_sampled_token_comes_first_among_the_top_logprobs_and_only_once():
    async with worker() as stand_in:
        sampling = {"temperature": 2, "seed": 3, "logprobs": 3, "max_tokens": 64}
        (choice,) = (await stand_in.generate_http(body(sampling=sampling)))["choices"]
        assert len(choice["logprobs"]["content"]) == 64
        for token, entry in zip(choice["token_ids"], choice["logprobs"]["content"], strict=True):
            first, *others = entry["top_logprobs"]
            assert first == {key: entry[key] for key in ("token_id", "logprob", "rank")}
            assert first["token_id"] == token
            assert len(others) == (2 if entry["rank"] <= 3 else 3)
            assert [other["rank"] for other in others] == [rank for rank in (1, 2, 3) if rank != entry["rank"]]
            assert math.isfinite(entry["logprob"])


@over_asyncio
async def test_both_wires_report_the_same_logprobs():
    async with worker() as stand_in:
        outputs = (await stand_in.generate(request("response { output_logprobs: true }"))).outputs
        (choice,) = (await stand_in.generate_http(body(sampling={"logprobs": 0})))["choices"]
        assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == list(outputs.logprobs)


@over_asyncio
async def test_chosen_ids_are_reported_only_with_a_fitting_count():
    async with worker() as stand_in:
        chosen = {"logprob_token_ids": [5, 5, 7], "max_tokens": 1}
        assert (await stand_in.generate_http(body(sampling=chosen)))["choices"][0]["logprobs"] is None
        reply = await stand_in.generate_http(body(sampling={**chosen, "logprobs": 3}))
        _, *others = reply["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        assert [(other["token_id"], other["rank"]) for other in others] == [(5, 1), (5, 2), (7, 3)]
        assert (await stand_in.post(GENERATE, body(sampling={**chosen, "logprobs": 2}))).status_code == 400


@over_asyncio
async def test_prompt_logprobs_are_null_and_then_one_object_per_position():
    async with worker() as stand_in:
        first, *rest = (await stand_in.generate_http(body(sampling={"prompt_logprobs": 1})))["prompt_logprobs"]
        assert first is None
        assert [str(token) in position for token, position in zip((2, 3), rest, strict=True)] == [True, True]
        assert rest[0]["2"]["decoded_token"] == "token_id:2"
        assert all(len(position) == 2 for position in rest)


@over_asyncio
async def test_a_stream_has_a_chunk_for_each_token_without_nulls():
    async with worker() as stand_in:
        whole = await stand_in.generate_http(body())
        chunks = await events(stand_in, request_id="mine")
        assert {chunk["request_id"] for chunk in chunks} == {"mine"}
        choices = [chunk["choices"][0] for chunk in chunks]
        assert [choice["token_ids"] for choice in choices] == [[token] for token in whole["choices"][0]["token_ids"]]
        assert [set(choice) for choice in choices[:-1]] == [{"index", "token_ids"}] * 3
        assert choices[-1]["finish_reason"] == "length"
        assert choices[-1]["weight_versions"] == [{"version": "default", "start": 0, "end": 4}]
        assert "stop_reason" not in choices[-1]


@over_asyncio
async def test_usage_comes_in_a_chunk_of_its_own_or_in_every_chunk():
    async with worker() as stand_in:
        *chunks, last = await events(stand_in, stream_options={"include_usage": True})
        assert not any("usage" in chunk for chunk in chunks)
        assert last["choices"] == []
        assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"], last["usage"]["total_tokens"]) == (3, 4, 7)
        both = {"include_usage": True, "continuous_usage_stats": True}
        counted = [chunk["usage"]["completion_tokens"] for chunk in await events(stand_in, stream_options=both)]
        assert counted == [1, 2, 3, 4, 4]
        alone = await events(stand_in, stream_options={"continuous_usage_stats": True})
        assert not any("usage" in chunk for chunk in alone)


@over_asyncio
async def test_prompt_ids_come_with_the_first_chunk_when_asked_for():
    async with worker() as stand_in:
        chunks = await events(stand_in, return_token_ids=True)
        assert [chunk.get("prompt_token_ids") for chunk in chunks] == [[1, 2, 3], None, None, None]


@over_asyncio
async def test_a_call_can_raise_the_stream_interval_and_not_lower_it():
    async with worker(stream_interval=2) as stand_in:
        for asked, sizes in ((1, [1, 2, 2]), (4, [1, 4])):
            sampling = {"max_tokens": 5, "stream_interval": asked}
            chunks = await events(stand_in, sampling={**sampling, "temperature": 0})
            assert [len(chunk["choices"][0]["token_ids"]) for chunk in chunks] == sizes


@over_asyncio
async def test_a_stop_token_is_the_stop_reason_and_the_end_of_sequence_is_none():
    async with worker() as stand_in:
        stopped = {"allowed_token_ids": [65], "stop_token_ids": [65]}
        (choice,) = (await stand_in.generate_http(body(sampling=stopped)))["choices"]
        assert (choice["finish_reason"], choice["stop_reason"], choice["token_ids"]) == ("stop", 65, [65])
        (choice,) = (await stand_in.generate_http(body(sampling={"allowed_token_ids": [256]})))["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)


@over_asyncio
async def test_an_omitted_temperature_samples():
    async with worker() as stand_in:
        sampling = {"max_tokens": 64}
        one, two = [(await stand_in.generate_http({"token_ids": [1], "sampling_params": sampling}))["choices"] for _ in range(2)]
        assert one != two


@over_asyncio
async def test_a_prefill_call_returns_parameters_that_a_decode_call_can_take():
    async with worker() as stand_in:
        prefill = body(range(1, 40), sampling={"max_tokens": 1}, kv_transfer_params={"do_remote_decode": True})
        params = (await stand_in.generate_http(prefill))["kv_transfer_params"]
        assert (params["do_remote_prefill"], params["remote_block_ids"]) == (True, [[0, 1, 2]])
        decode = body(range(1, 40), kv_transfer_params=params)
        assert (await stand_in.generate_http(decode))["kv_transfer_params"] is None


BAD_REQUEST, MALFORMED = "BadRequestError", "Bad Request"


@pytest.mark.parametrize(
    ("change", "kind", "param"),
    [
        ({"token_ids": []}, BAD_REQUEST, "token_ids"),
        ({"output_mode": "text"}, BAD_REQUEST, "output_mode"),
        ({"cache_salt": ""}, BAD_REQUEST, None),
        ({"cache_salt": "a@"}, BAD_REQUEST, None),
        ({"token_ids": [40000]}, BAD_REQUEST, None),
        ({"token_ids": [1] * 32768}, BAD_REQUEST, "input_tokens"),
        ({"content_parts": [{"type": "image_url"}]}, BAD_REQUEST, "content_parts"),
        ({"sampling_params": {"n": 2}}, BAD_REQUEST, "n"),
        ({"sampling_params": {"n": 0}}, BAD_REQUEST, "n"),
        ({"sampling_params": {"stop": ["x"]}}, BAD_REQUEST, "stop"),
        ({"sampling_params": {"include_stop_str_in_output": True}}, BAD_REQUEST, "include_stop_str_in_output"),
        ({"sampling_params": {"max_tokens": 0}}, BAD_REQUEST, "sampling_params"),
        ({"sampling_params": {"prompt_logprobs": 0}, "stream": True}, BAD_REQUEST, "sampling_params"),
        ({"sampling_params": {"temperature": 9}}, BAD_REQUEST, None),
        ({"sampling_params": {"temperature": 9}, "stream": True}, BAD_REQUEST, None),
        ({"sampling_params": {"logprobs": 21}}, BAD_REQUEST, None),
        ({"sampling_params": {"logprobs": -1}}, BAD_REQUEST, None),
        ({"sampling_params": {"allowed_token_ids": []}}, BAD_REQUEST, None),
        ({"sampling_params": {"routed_experts_prompt_start": 4}}, BAD_REQUEST, None),
        ({"token_ids": ["a"]}, MALFORMED, None),
        ({"token_ids": [-1]}, MALFORMED, None),
        ({"token_ids": [2**32]}, MALFORMED, None),
        ({"stream": "x"}, MALFORMED, None),
        ({"priority": "x"}, MALFORMED, None),
        ({"output_mode": "x"}, MALFORMED, None),
        ({"kv_transfer_params": [1]}, MALFORMED, None),
        ({"sampling_params": {"top_k": -1}}, MALFORMED, None),
        ({"sampling_params": {"temperature": "x"}}, MALFORMED, None),
        ({"sampling_params": {"logit_bias": {"5": 1.0}}}, MALFORMED, None),
        ({"sampling_params": {"structured_outputs": {}}}, MALFORMED, None),
        ({"sampling_params": {"structured_outputs": {"json": "{"}}}, MALFORMED, None),
        ({"sampling_params": None}, MALFORMED, None),
    ],
)
@over_asyncio
async def test_a_bad_request_is_400_with_vllms_error_object(change, kind, param):
    async with worker() as stand_in:
        response = await stand_in.post(GENERATE, {**body(), **change})
        error = response.json()["error"]
        assert (response.status_code, error["type"], error["param"], error["code"]) == (400, kind, param, 400)
        assert error["message"]


@pytest.mark.parametrize(("content", "kind"), [(b"{", "application/json"), (b"{}", "text/plain"), (b"", "application/json")])
@over_asyncio
async def test_a_body_that_is_no_json_is_400(content, kind):
    async with worker() as stand_in:
        response = await stand_in.http.post(GENERATE, content=content, headers={"content-type": kind})
        assert (response.status_code, response.json()["error"]["type"]) == (400, MALFORMED)


@pytest.mark.parametrize(("rank", "status"), [("0", 200), ("x", 200), ("7", 400)])
@over_asyncio
async def test_only_a_number_that_is_not_connected_is_a_wrong_rank(rank, status):
    async with worker() as stand_in:
        response = await stand_in.http.post(GENERATE, json=body(), headers={"X-data-parallel-rank": rank})
        assert response.status_code == status


@over_asyncio
async def test_unknown_keys_are_ignored():
    async with worker() as stand_in:
        reply = await stand_in.generate_http(body(sampling={"colour": 1}, features={"mm_hashes": {}}, colour=2))
        assert reply["choices"][0]["finish_reason"] == "length"
