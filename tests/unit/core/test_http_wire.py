"""Calls over a worker's HTTP server, with the exact answers of vLLM 0.33 and 0.31."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import httpx
import msgspec
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from core.call import Identity, ReasoningParserKwargs, SamplingParams
from core.errors import CallError, WorkerLost, from_http
from core.wire.http_lane import HttpLane
from core.wire.http_lifting import lift_from_http
from core.wire.http_lowering import lower_to_http
from core.wire.needs import RUST_HTTP_CAN
from tests.unit.core.rig import make_call

# --- lowering ----------------------------------------------------------------------------------------------------------------


def lowered(index: int = 0, sampling=None, **fields):
    return lower_to_http(make_call(sampling=SamplingParams(**(sampling or {})), **fields), index=index, max_model_len=100)


def test_what_is_absent_means_what_it_means_over_grpc():
    assert lowered() == {
        "request_id": "r1",
        "token_ids": [1, 2, 3],
        "sampling_params": {"temperature": 1.0, "max_tokens": 97},
        "priority": 0,
    }


def test_a_prompt_that_leaves_no_room_is_the_workers_to_refuse():
    assert lowered(token_ids=[1] * 200)["sampling_params"]["max_tokens"] == 1


def test_every_field_goes_by_vllms_name():
    body = lowered(
        model="tiny",
        identity=Identity("v7"),
        priority=3,
        kv_transfer_params={"a": 1},
        ec_transfer_params={},
        return_token_ids=True,
        reasoning_ended=False,
        reasoning_parser_kwargs=ReasoningParserKwargs({"x": 1}),
    )
    assert body["model"] == "tiny"
    assert body["cache_salt"] == "v7"
    assert body["priority"] == 3
    assert (body["kv_transfer_params"], body["ec_transfer_params"]) == ({"a": 1}, {})
    assert body["return_token_ids"] is True
    assert body["reasoning_ended"] is False
    assert body["reasoning_parser_kwargs"] == {"chat_template_kwargs": {"x": 1}}


def test_an_adapter_is_a_model_over_http():
    assert lowered(model="tiny", adapter="math")["model"] == "math"


def test_n_outputs_are_n_requests_with_derived_seeds():
    bodies = [lowered(i, {"n": 2, "seed": 5}) for i in range(2)]
    assert [(body["request_id"], body["sampling_params"]["seed"]) for body in bodies] == [("r1-0", 5), ("r1-1", 6)]
    assert all("n" not in body["sampling_params"] for body in bodies)
    assert lowered(1, {"n": 2, "seed": -1})["sampling_params"]["seed"] == -1


def test_only_the_first_of_n_outputs_asks_about_the_prompt():
    sampling = {"n": 2, "prompt_logprobs": 1, "prompt_logprob_token_ids": [[1]], "prompt_logprob_start": 0}
    first, second = (lowered(i, sampling, return_token_ids=True) for i in range(2))
    assert {"prompt_logprobs", "prompt_logprob_token_ids", "prompt_logprob_start"} <= set(first["sampling_params"])
    assert first["return_token_ids"] is True
    assert not any(key.startswith("prompt_") for key in second["sampling_params"])
    assert "return_token_ids" not in second


def test_selected_ids_go_with_their_count_because_the_server_drops_them_otherwise():
    assert lowered(sampling={"logprob_token_ids": [66, 65, 66]})["sampling_params"]["logprobs"] == 3


def test_minus_one_for_all_tokens_is_the_zero_that_the_rust_server_knows():
    assert lowered(sampling={"top_k": -1})["sampling_params"]["top_k"] == 0


def test_a_stream_asks_for_the_usage_that_carries_the_counts():
    body = lowered(stream=True)
    assert (body["stream"], body["stream_options"]) == (True, {"include_usage": True})


# --- lifting -----------------------------------------------------------------------------------------------------------------

UNARY_33 = (
    b'{"request_id":"r1","choices":[{"index":0,"logprobs":{"content":[{"token_id":34,"logprob":-1.3862944,"rank":2,"top_logprobs":'
    b'[{"token_id":34,"logprob":-1.3862944,"rank":2},{"token_id":33,"logprob":-0.6931472,"rank":1}]}]},"finish_reason":"length",'
    b'"stop_reason":null,"token_ids":[34],"routed_experts":null,"sampling_mask":null,"weight_versions":[{"version":"default","start":0,'
    b'"end":1}]}],"prompt_logprobs":[null,{"100":{"logprob":-0.6931472,"rank":1,"decoded_token":"token_id:100"},"2":{"logprob":'
    b'-1.3862944,"rank":2,"decoded_token":"token_id:2"}},{"3":{"logprob":-2.0794415,"rank":3,"decoded_token":"token_id:3"}}],'
    b'"prompt_token_id_logprobs":null,"prompt_token_ids":[1,2,3],"mm_placeholders":null,"kv_transfer_params":null,'
    b'"ec_transfer_params":null,"metrics":null}'
)
UNARY_31 = (
    b'{"request_id":"r1","choices":[{"index":0,"logprobs":{"content":[{"token":"token_id:5","logprob":-2.21657,"bytes":[116,111],'
    b'"top_logprobs":[{"token":"token_id:5","logprob":-2.21657,"bytes":[116]},{"token":"token_id:5","logprob":-2.21657,"bytes":[116]}]},'
    b'{"token":"token_id:293","logprob":-4.590807,"bytes":[116],"top_logprobs":[{"token":"token_id:293","logprob":-4.590807,"bytes":[1]},'
    b'{"token":"token_id:39","logprob":-2.1943622,"bytes":[1]}]}]},"finish_reason":"length","token_ids":[5,293]}],'
    b'"prompt_logprobs":null,"prompt_token_id_logprobs":null,"prompt_token_ids":null,"mm_placeholders":null,"kv_transfer_params":null,'
    b'"ec_transfer_params":null,"metrics":null}'
)


def tops(entry):
    return [(top.token_id, top.logprob, top.rank) for top in entry.top_logprobs]


def test_an_answer_of_vllm_033():
    output = lift_from_http(make_call(), UNARY_33, 1)
    choice = output.choice
    assert (choice.index, choice.token_ids, choice.finish_reason, choice.stop_reason) == (1, [34], "length", None)
    assert choice.logprobs
    [entry] = choice.logprobs.content
    assert (entry.token_id, entry.rank, entry.token) == (34, 2, "token_id:34")
    assert tops(entry) == [(34, -1.3862944, 2), (33, -0.6931472, 1)]
    assert msgspec.to_builtins(choice.weight_versions) == [{"version": "default", "start": 0, "end": 1}]
    assert output.prompt_token_ids == [1, 2, 3]
    assert (output.prompt_tokens, output.completion_tokens, output.cached_tokens) == (3, 1, None)


def test_the_prompts_own_token_comes_first_though_the_server_sends_them_in_no_order():
    positions = lift_from_http(make_call(), UNARY_33, 0).prompt_logprobs
    assert positions
    assert [position and list(position) for position in positions] == [None, ["2", "100"], ["3"]]


def test_the_prompts_own_token_is_that_of_the_prompt_which_the_worker_made_of_a_medium():
    data = (
        b'{"choices":[{"token_ids":[7],"finish_reason":"length"}],"prompt_token_ids":[1,9,9,2],"prompt_logprobs":[null,'
        b'{"5":{"logprob":-1},"9":{"logprob":-2}},{"1":{"logprob":-1},"9":{"logprob":-2}},{"3":{"logprob":-1},"2":{"logprob":-2}}]}'
    )
    positions = lift_from_http(make_call(token_ids=[1, 9, 2]), data, 0).prompt_logprobs
    assert positions
    assert [next(iter(position)) for position in positions if position] == ["9", "9", "2"]


def test_an_answer_of_vllm_031_names_tokens_by_text_and_repeats_the_sampled_one():
    choice = lift_from_http(make_call(), UNARY_31, 0).choice
    assert choice.logprobs
    first, second = choice.logprobs.content
    assert (first.token_id, first.rank) == (5, None)
    assert tops(first) == [(5, -2.21657, None)]
    assert tops(second) == [(293, -4.590807, None), (39, -2.1943622, None)]
    assert choice.weight_versions is None


def test_what_only_http_carries_is_kept():
    data = (
        b'{"choices":[{"index":0,"token_ids":[7],"finish_reason":"repetition","stop_reason":"zz","routed_experts":"k05V",'
        b'"sampling_mask":[[1,2]]}],"prompt_token_id_logprobs":"k05V","kv_transfer_params":{"port":5600},"metrics":{"a":1}}'
    )
    output = lift_from_http(make_call(), data, 0)
    choice = output.choice
    assert (choice.finish_reason, choice.stop_reason) == ("repetition", "zz")
    assert (choice.routed_experts, choice.sampling_mask) == ("k05V", [[1, 2]])
    assert (output.prompt_token_id_logprobs, output.kv_transfer_params, output.metrics) == ("k05V", {"port": 5600}, {"a": 1})


def test_a_prompt_that_was_expanded_counts_as_it_came_back():
    data = msgspec.json.encode({"choices": [{"index": 0, "token_ids": [7]}], "prompt_token_ids": [1, 2, 2, 2, 3]})
    assert lift_from_http(make_call(), data, 0).prompt_tokens == 5


def test_an_engine_error_inside_a_200_is_the_status_that_grpc_tells():
    with pytest.raises(CallError) as raised:
        lift_from_http(make_call(), b'{"choices":[{"token_ids":[7],"finish_reason":"error"}]}', 0)
    assert (raised.value.status, raised.value.message) == (500, "engine failed during generation")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"<html>",
        b"[]",
        b'{"choices":[{"token_ids":"x"}]}',
        b'{"choices":[{"token_ids":[1],"logprobs":{"content":[{"token":"hello","logprob":-1.0}]}}]}',
        b'{"error":3}',
        b'{"error":{"message":[]}}',
        b'{"choices":' + b"[" * 5000 + b"]" * 5000 + b"}",
    ],
)
def test_what_cannot_be_read_is_the_workers_fault(data):
    with pytest.raises(CallError) as raised:
        lift_from_http(make_call(), data, 0)
    assert raised.value.status == 502
    assert not isinstance(raised.value, WorkerLost)


def test_a_unary_answer_without_choices_is_the_workers_fault():
    with pytest.raises(CallError) as raised:
        lift_from_http(make_call(), b"{}", 0)
    assert raised.value.status == 502


@pytest.mark.parametrize(
    ("error", "status"),
    [
        ('{"message":"no","type":"InternalServerError","param":null,"code":500}', 500),
        ('{"message":"no","type":"BadRequestError","param":null,"code":400}', 400),
        ('{"message":"no","type":"server_error","param":null,"code":"server_error"}', 500),
        ('{"message":"no","type":"invalid_request_error","param":null,"code":"invalid_request_error"}', 400),
        ('{"message":"no","type":"invalid_request_error","param":"model","code":"model_not_found"}', 404),
        ('{"message":"no","code":200}', 502),
        ('{"message":"no","code":99999}', 502),
    ],
)
def test_an_error_in_a_stream_has_its_status_in_either_versions_words(error, status):
    with pytest.raises(CallError) as raised:
        lift_from_http(make_call(stream=True), f'{{"error":{error}}}', 0)
    assert (raised.value.status, raised.value.message) == (status, "no")
    assert raised.value.body


def test_a_paused_engine_is_a_lost_worker_in_a_stream_too():
    error = '{"message":"Generation is paused.","type":"ServiceUnavailableError","param":null,"code":503}'
    with pytest.raises(WorkerLost, match="Generation is paused"):
        lift_from_http(make_call(stream=True), f'{{"error":{error}}}', 0)


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (400, b'{"error":{"message":"no","type":"BadRequestError","param":"n","code":400}}', (400, "no", "n")),
        (404, b'{"error":{"message":"no","type":"invalid_request_error","param":"model","code":"model_not_found"}}', (404, "no", "model")),
        (400, b'{"error":"no"}', (400, "no", None)),
        (404, b"", (404, "the worker answered 404", None)),
        (500, b"oops", (500, "oops", None)),
        (400, b"\xff", (400, "\ufffd", None)),
        (307, b"", (502, "the worker answered 307", None)),
        (204, b"", (502, "the worker answered 204", None)),
        (599, b"", (502, "the worker answered 599", None)),
        (400, b"[" * 5000, (400, "[" * 500, None)),
    ],
)
def test_a_workers_http_error_is_ours(status, body, expected):
    error = from_http(status, body)
    assert (error.status, error.message, error.param) == expected
    assert error.body.error.code == error.status


def test_a_503_is_a_lost_worker():
    assert isinstance(from_http(503, b'{"error":{"message":"Generation is paused."}}'), WorkerLost)


# --- the lane ----------------------------------------------------------------------------------------------------------------


def lane_to(handler):
    client = httpx.AsyncClient(base_url="http://worker", transport=httpx.MockTransport(handler))
    return HttpLane(client, can=RUST_HTTP_CAN, max_model_len=100)


async def generate(lane, **fields):
    call = make_call(**fields)
    return await lane.generate(call, lane.lower(call, 0), 0)


async def stream(lane, **fields):
    call = make_call(stream=True, **fields)
    outputs = []
    async with lane.stream(call, lane.lower(call, 0), 0) as source:
        while batch := await source.receive():
            outputs += batch
        assert await source.receive() == []
    return outputs


async def test_a_unary_call_posts_its_body_and_lifts_the_answer():
    seen = []

    def handler(request):
        seen.append((request.method, request.url.path, msgspec.json.decode(request.content)["token_ids"], request.headers))
        return httpx.Response(200, content=UNARY_33)

    output = await generate(lane_to(handler).at_rank(2), session_id="séance")
    assert output.choice.token_ids == [34]
    [(method, path, token_ids, headers)] = seen
    assert (method, path, token_ids) == ("POST", "/inference/v1/generate", [1, 2, 3])
    assert headers["x-data-parallel-rank"] == "2"
    assert dict(headers.raw)[b"x-session-id"] == "séance".encode("latin-1")


async def test_an_error_answer_is_raised_on_both_ways():
    lane = lane_to(lambda _: httpx.Response(400, json={"error": {"message": "no", "param": "n"}}))
    with pytest.raises(CallError, match="no"):
        await generate(lane)
    with pytest.raises(CallError, match="no"):
        await stream(lane)


async def test_a_server_that_wants_another_key_is_a_lost_worker_on_both_ways_and_no_fault_of_the_client():
    lane = lane_to(lambda _: httpx.Response(401, json={"error": "Unauthorized"}))
    for ask in (generate, stream):
        with pytest.raises(WorkerLost, match=r"http://worker wants an API key \(401\): let api_key_env name"):
            await ask(lane)


async def test_a_connection_that_fails_is_a_lost_worker_on_both_ways():
    def handler(request):
        raise httpx.ConnectError("refused", request=request)

    with pytest.raises(WorkerLost, match="refused"):
        await generate(lane_to(handler))
    with pytest.raises(WorkerLost, match="refused"):
        await stream(lane_to(handler))


STREAM_33 = (
    b'data: {"request_id":"r1","choices":[{"index":0,"token_ids":[34]}],"prompt_token_ids":[1,2,3]}\n\n'
    b": a comment\n\n"
    b'data: {"request_id":"r1","choices":[{"index":0,"finish_reason":"length","token_ids":[118],"weight_versions":[{"version":"default",'
    b'"start":0,"end":2}]}]}\n\n'
    b'data: {"request_id":"r1","choices":[],"usage":{"prompt_tokens":9,"total_tokens":11,"completion_tokens":2,"prompt_tokens_details":'
    b'{"cached_tokens":4},"completion_tokens_details":{"reasoning_tokens":0}}}\n\n'
    b"data: [DONE]\n\n"
)


def events(data):
    return lane_to(lambda _: httpx.Response(200, headers={"content-type": "text/event-stream"}, content=data))


async def test_a_stream_is_one_output_for_each_choice_and_the_last_has_the_counts_as_over_grpc():
    first, last = await stream(events(STREAM_33))
    assert (first.choice.token_ids, first.choice.finish_reason, first.prompt_token_ids) == ([34], None, [1, 2, 3])
    assert (last.choice.token_ids, last.choice.finish_reason) == ([118], "length")
    assert (last.prompt_tokens, last.completion_tokens, last.cached_tokens) == (9, 2, 4)
    assert msgspec.to_builtins(last.choice.weight_versions) == [{"version": "default", "start": 0, "end": 2}]


async def test_a_stream_of_a_server_that_tells_no_usage_still_ends():
    first, last = await stream(events(b"".join(part + b"\n\n" for part in STREAM_33.split(b"\n\n") if b"usage" not in part)))
    assert (first.choice.token_ids, last.choice.finish_reason) == ([34], "length")


@pytest.mark.parametrize("count", [0, 1, 2])
async def test_a_stream_that_ends_before_its_end_is_a_lost_worker(count):
    with pytest.raises(WorkerLost, match="closed the stream before its end"):
        await stream(events(b"".join(part + b"\n\n" for part in STREAM_33.split(b"\n\n")[:count])))


async def test_an_error_event_ends_the_stream():
    error = b'data: {"error":{"message":"Internal server error","type":"InternalServerError","param":null,"code":500}}\n\ndata: [DONE]\n\n'
    with pytest.raises(CallError, match="Internal server error"):
        await stream(events(error))


@asynccontextmanager
async def lane_over_a_socket(serve: Callable[[trio.SocketStream], Awaitable[None]]) -> AsyncIterator[HttpLane]:
    """A lane to a server that does this with each connection."""
    async with trio.open_nursery() as nursery:
        [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, serve, [listener])
        port = listener.socket.getsockname()[1]
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=None) as client:
            yield HttpLane(client, can=RUST_HTTP_CAN, max_model_len=100)
        nursery.cancel_scope.cancel()


async def test_releasing_a_stream_resets_it_on_the_worker_while_somebody_reads():
    """Over a real socket: what is shut down is the connection."""
    ended = trio.Event()

    async def serve(connection):
        await connection.receive_some()
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        event = b'data: {"choices":[{"index":0,"token_ids":[34]}]}\n\n'
        await connection.send_all(head + b"%x\r\n%s\r\n" % (len(event), event))
        while await connection.receive_some():
            pass
        ended.set()

    async with lane_over_a_socket(serve) as lane:
        call = make_call(stream=True)
        async with lane.stream(call, lane.lower(call, 0), 0) as source:
            assert [output.choice.token_ids for output in await source.receive()] == [[34]]
            source.release()
            with trio.fail_after(5):
                await ended.wait()
                with pytest.raises(WorkerLost):
                    await source.receive()
            source.release()


async def test_a_stream_that_was_read_to_its_end_leaves_a_connection_for_the_next():
    connections = 0

    async def serve(connection):
        nonlocal connections
        connections += 1
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        async for data in connection:
            if b"token_ids" not in data:  # the head of the request, without its body
                continue
            await connection.send_all(head + b"%x\r\n%s\r\n" % (len(STREAM_33), STREAM_33))
            await wait_all_tasks_blocked()
            await connection.send_all(b"0\r\n\r\n")

    async with lane_over_a_socket(serve) as lane:
        assert len(await stream(lane)) == 2
        assert len(await stream(lane)) == 2
    assert connections == 1


async def test_a_cancelled_stream_closes_its_connection():
    begun, ended = trio.Event(), trio.Event()

    async def serve(connection):
        await connection.receive_some()
        await connection.send_all(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        begun.set()
        with suppress(trio.BrokenResourceError):  # a client that hasn't read the head yet resets the connection
            while await connection.receive_some():
                pass
        ended.set()

    async with lane_over_a_socket(serve) as lane:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream, lane)
            await begun.wait()
            nursery.cancel_scope.cancel()
        with trio.fail_after(5):
            await ended.wait()
