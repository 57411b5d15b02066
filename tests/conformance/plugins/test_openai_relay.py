"""OpenAI's routes through a real headrace: the `openai` package as the client, and the bytes beside those of the direct answer."""

import asyncio
import json
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import openai
import pytest

from tests import workers
from tests.proxy import HOSTS, RunningProxy, headrace, wait_for
from tests.workers import RunningWorker
from tests.workers.scripted_engine.behaviour import Behaviour

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0}
COMPLETION = {"prompt": "hello", "max_tokens": 4, "temperature": 0}
COUNTED = {"stream": True, "stream_options": {"include_usage": True}}
#: route and body; all that a server of vLLM has, and what it refuses.
REQUESTS: list[tuple[str, Any]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", CHAT | COUNTED),
    # What an evaluation of Prime-RL sends.
    ("/v1/chat/completions", CHAT | {"max_completion_tokens": 3, "extra_body": {"top_k": 20}}),
    ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2}),
    ("/v1/chat/completions", {"messages": []}),
    ("/v1/chat/completions", CHAT | {"n": 2}),
    ("/v1/chat/completions", CHAT | {"temperature": "hot"}),
    ("/v1/chat/completions/render", CHAT),
    ("/v1/completions", COMPLETION),
    ("/v1/completions", COMPLETION | COUNTED),
    ("/v1/completions", COMPLETION | {"prompt": [72, 105], "logprobs": 1, "seed": 7}),
    ("/v1/completions", COMPLETION | {"prompt": "long " * 3000}),
    ("/v1/responses", {"input": "hello", "max_output_tokens": 3}),
    ("/v1/embeddings", {"input": "hello"}),
    ("/tokenize", {"prompt": "hello"}),
    ("/tokenize", {"messages": CHAT["messages"]}),
    ("/detokenize", {"tokens": [72, 105]}),
]
#: A stream that says nothing after its first token: its first prompt token tells the scripted engine so.
STALLING = {"prompt": [int(Behaviour.STALL), 1, 70], "max_tokens": 100}
SILENT = {"prompt": [int(Behaviour.SILENT), 70], "max_tokens": 100}


@pytest.fixture(scope="module")
def proxy(worker: RunningWorker) -> Iterator[RunningProxy]:
    with headrace(worker) as proxy:
        yield proxy


@pytest.fixture(scope="module", params=[pytest.param(f"{kind}_worker", marks=pytest.mark.real) for kind in ("scripted", "engine")])
def real_worker(request: pytest.FixtureRequest) -> RunningWorker:
    """Each of the workers that have text."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def real_proxy(real_worker: RunningWorker) -> Iterator[RunningProxy]:
    with headrace(real_worker) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def scripted_proxy(scripted_worker: RunningWorker) -> Iterator[RunningProxy]:
    with headrace(scripted_worker) as proxy:
        yield proxy


@pytest.fixture
def client(real_proxy: RunningProxy) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{real_proxy.url}/v1", api_key="of the client", max_retries=0) as client:
        yield client


def answer(url: str, route: str, body: Any) -> tuple[int, dict[str, str], str]:
    """Status, headers and body; the id is the same for every request, and the time of the answer is left out."""
    reply = httpx.post(f"{url}{route}", json=body, headers={"x-request-id": "same"}, timeout=60, trust_env=False)
    headers = {name: value for name, value in reply.headers.items() if name not in ("date", "server", "connection")}
    return reply.status_code, headers, re.sub(r'"created":\d+', '"created":0', reply.text)


@pytest.mark.parametrize(("route", "body"), REQUESTS, ids=lambda value: value if isinstance(value, str) else "")
def test_an_answer_is_the_workers_own_byte_for_byte(proxy, worker, route, body):
    status, headers, text = answer(proxy.url, route, body)
    added = {name: headers.pop(name) for name in ("x-request-id", "x-headrace-worker", "x-headrace-route")}
    assert added == {"x-request-id": "same", "x-headrace-worker": "w0", "x-headrace-route": "round-robin"}
    assert (status, headers, text) == answer(worker.http, route, body)


def test_the_stand_in_says_why_it_has_none(stand_in_worker):
    with (
        headrace(stand_in_worker) as proxy,
        openai.OpenAI(base_url=f"{proxy.url}/v1", api_key="x", max_retries=0) as client,
        pytest.raises(openai.InternalServerError, match="the stand-in has no model and answers in tokens only") as raised,
    ):
        client.chat.completions.create(model=stand_in_worker.model, messages=[])
    assert raised.value.status_code == 501


def test_a_call_without_a_body_is_told_what_was_expected(proxy):
    reply = httpx.post(f"{proxy.url}/v1/completions", trust_env=False)
    assert (reply.status_code, reply.json()["error"]["type"]) == (400, "BadRequestError")


# --- the openai package ------------------------------------------------------------------------------------------------------


def test_a_chat_has_an_answer_and_its_usage(client, real_worker, real_proxy):
    chat = client.chat.completions.with_raw_response.create(model=real_worker.model, **CHAT)
    reply = chat.parse()
    assert (reply.usage.completion_tokens, reply.choices[0].finish_reason) == (4, "length")
    event = real_proxy.settled(chat.headers["x-request-id"])
    assert (event["prompt"], event["output"], event["wire"]) == (reply.usage.prompt_tokens, 4, "http")


def test_a_streamed_chat_is_the_whole_one_in_pieces(client, real_worker, real_proxy):
    whole = client.chat.completions.create(model=real_worker.model, **CHAT)
    headers = {"x-request-id": "streamed-chat"}
    chunks = list(client.chat.completions.create(model=real_worker.model, **CHAT, **COUNTED, extra_headers=headers))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    assert real_proxy.settled("streamed-chat")["output"] == 4


def test_a_completion_and_its_stream_are_the_same(client, real_worker):
    whole = client.completions.create(model=real_worker.model, **COMPLETION)
    stream = client.completions.create(model=real_worker.model, **COMPLETION, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text


def test_errors_have_the_packages_own_types(client, real_worker):
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.completions.create(model=real_worker.model, prompt="long " * 3000, max_tokens=1)
    with pytest.raises(openai.NotFoundError, match="The model `nope` does not exist"):
        client.chat.completions.create(model="nope", messages=[])


def test_the_models_are_listed(client, real_worker):
    assert real_worker.model in [model.id for model in client.models.list()]


# --- what reaches the engine -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "headers"),
    [
        ({"cache_salt": "7"}, {}),
        # A literal key of the body, as Prime-RL's evaluations have it; the engine reads the top level only.
        ({"extra_body": {"cache_salt": "7", "top_k": 20}}, {}),
        ({}, {"x-cache-salt": "7"}),
    ],
)
def test_the_salt_reaches_the_engine_from_wherever_the_client_wrote_it(scripted_proxy, scripted_worker, place, headers):
    since = len(scripted_worker.engine_events())
    headers = {"x-session-id": "rollout-1", **headers}
    httpx.post(f"{scripted_proxy.url}/v1/chat/completions", json=CHAT | place, headers=headers, trust_env=False).raise_for_status()
    seen = scripted_worker.wait_for_event("add", since=since)
    assert (seen["cache_salt"], seen["session_id"]) == ("7", "rollout-1")


# --- cancellation, and many at once ------------------------------------------------------------------------------------------


def nothing_runs(worker: RunningWorker, proxy: RunningProxy) -> None:
    wait_for(lambda: worker.running_requests() == 0 and proxy.in_flight() == 0)


def endless(worker: RunningWorker) -> dict[str, Any]:
    """A completion that nobody waits for to its end."""
    if worker.kind == "scripted":
        return STALLING
    return {"prompt": "hello", "max_tokens": worker.max_model_len - 100, "extra_body": {"ignore_eos": True}}


def test_leaving_a_stream_cancels_it_on_the_worker(client, real_worker, real_proxy):
    stream = client.completions.create(model=real_worker.model, stream=True, **endless(real_worker))
    next(stream)
    wait_for(lambda: real_worker.running_requests() == 1)
    stream.close()
    nothing_runs(real_worker, real_proxy)


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_before_the_first_byte_cancels_it_on_the_worker(scripted_worker, scripted_proxy, stream):
    body = json.dumps(SILENT | {"stream": stream}).encode()
    with _post(scripted_proxy, body):
        wait_for(lambda: scripted_worker.running_requests() == 1)
    nothing_runs(scripted_worker, scripted_proxy)


def test_leaving_a_reply_that_is_not_streamed_cancels_it_on_the_worker(client, real_worker, real_proxy):
    with pytest.raises(openai.APITimeoutError):
        client.completions.create(model=real_worker.model, timeout=0.5, **endless(real_worker))
    nothing_runs(real_worker, real_proxy)


def test_two_hundred_streams_run_at_once(client, real_worker):
    together = 200 if real_worker.kind == "scripted" else 20

    async def one(client: openai.AsyncOpenAI) -> str:
        stream = await client.completions.create(model=real_worker.model, **COMPLETION, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key="x", max_retries=0) as many:
            return await asyncio.gather(*[one(many) for _ in range(together)])

    texts = asyncio.run(asyncio.wait_for(all_of_them(), 120))
    assert (len(texts), len(set(texts))) == (together, 1)


def test_a_storm_of_disconnects_leaves_nothing_in_flight(scripted_worker, scripted_proxy):
    storm = [_post(scripted_proxy, json.dumps(each | {"stream": True}).encode()) for each in (STALLING, SILENT) * 50]
    wait_for(lambda: scripted_worker.running_requests() == 100)
    for connection in storm:
        connection.close()
    nothing_runs(scripted_worker, scripted_proxy)
    assert answer(scripted_proxy.url, "/v1/completions", COMPLETION)[0] == 200


def test_a_stream_whose_worker_dies_is_an_error_for_the_package(scripted_worker):
    with (
        workers.scripted() as doomed,
        headrace(doomed, scripted_worker) as proxy,
        openai.OpenAI(base_url=f"{proxy.url}/v1", api_key="x", max_retries=0) as client,
    ):
        streams = [client.completions.create(model=doomed.model, stream=True, **STALLING) for _ in range(2)]
        for stream in streams:
            next(stream)
        doomed.send_signal(signal.SIGKILL)
        broken = next(stream for stream in streams if stream.response.headers["x-headrace-worker"] == "w0")
        with pytest.raises(openai.APIError, match="the worker's HTTP server was lost"):
            list(broken)
        replies = [client.completions.with_raw_response.create(model=scripted_worker.model, **COMPLETION) for _ in range(3)]
        assert {reply.headers["x-headrace-worker"] for reply in replies} == {"w1"}


def test_a_stream_whose_worker_dies_never_ends_well_whoever_hosts_headrace(scripted_worker):
    body = STALLING | {"stream": True}
    with ExitStack() as stack:
        doomed = stack.enter_context(workers.scripted())
        proxies = [stack.enter_context(headrace(doomed, host=host)) for host in HOSTS]
        connections = [stack.enter_context(_post(proxy, json.dumps(body).encode())) for proxy in proxies]
        received = [_read_until(connection, b"data: ") for connection in connections]
        client = stack.enter_context(httpx.Client(http1=False, http2=True, trust_env=False))
        over_http2 = stack.enter_context(client.stream("POST", f"{proxies[0].url}/v1/completions", json=body))
        events = over_http2.iter_lines()
        assert next(events).startswith("data: ")
        doomed.send_signal(signal.SIGKILL)
        for before, connection in zip(received, connections, strict=True):
            whole = before + _read_until(connection, None)
            assert b'"type":"ServiceUnavailableError"' in whole
            assert b"[DONE]" not in whole
            assert not whole.endswith(b"\r\n0\r\n\r\n")  # the end of a chunked body
        rest = list(events)
        assert '"type":"ServiceUnavailableError"' in "".join(rest)
        assert "data: [DONE]" not in rest


def _read_until(connection: socket.socket, found: bytes | None) -> bytes:
    """What comes up to and with `found`, or up to the end."""
    data = b""
    while found is None or found not in data:
        more = connection.recv(65536)
        if not more:
            break
        data += more
    return data


def _post(proxy: RunningProxy, body: bytes) -> socket.socket:
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    connection = proxy.connect()
    connection.sendall(head.encode() + body)
    return connection
