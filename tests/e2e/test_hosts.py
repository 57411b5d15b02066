"""The same calls under each way to host headrace: `headrace serve`, `hypercorn core.app`, `hypercorn -k trio core.app`."""

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.replies import PATH, ask, body
from tests.proxy import HOSTS, RunningProxy, headrace, wait_for
from tests.workers import RunningWorker
from tests.workers.scripted_engine import Behaviour

PROMPT = b"Hello, w!"
GREEDY: dict[str, Any] = {"temperature": 0.0}
SEEDED: dict[str, Any] = {"temperature": 1.0, "seed": 11}


@pytest.fixture(scope="module", params=["scripted_worker", "engine_worker"])
def worker(request: pytest.FixtureRequest) -> RunningWorker:
    """The real servers, with a scripted and with the real engine."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module", params=HOSTS)
def proxy(worker: RunningWorker, request: pytest.FixtureRequest) -> Iterator[RunningProxy]:
    """headrace in front of the worker, under each host."""
    with headrace(worker, host=request.param) as proxy:
        yield proxy


@pytest.fixture(scope="module", params=HOSTS)
def scripted_proxy(scripted_worker: RunningWorker, request: pytest.FixtureRequest) -> Iterator[RunningProxy]:
    """The same in front of the scripted worker alone."""
    with headrace(scripted_worker, host=request.param) as proxy:
        yield proxy


def test_unary_and_streamed_replies_are_the_workers_own(proxy, worker):
    for tokens, mode in ((17, GREEDY), (120, SEEDED)):
        expected = ask(worker.http, body(PROMPT, tokens, **mode))
        assert ask(proxy.url, body(PROMPT, tokens, **mode)).as_told_by(expected) == expected
        assert ask(proxy.url, body(PROMPT, tokens, stream=True, **mode)).as_told_by(expected) == expected


def test_a_connection_serves_one_call_after_another(proxy):
    with httpx.Client(base_url=proxy.url, timeout=60, trust_env=False) as client:
        replies = [client.post(PATH, json=body(PROMPT, 3, stream=stream, **GREEDY)) for stream in (False, True, False)]
        assert [reply.status_code for reply in replies] == [200] * 3
        assert client.post(PATH, json=body([65] * 3000, 3)).status_code == 400
        assert client.post(PATH, json=body(PROMPT, 3, **GREEDY)).status_code == 200


def test_a_body_that_comes_in_pieces_is_one_call(proxy):
    data = json.dumps(body(PROMPT, 3, **GREEDY)).encode()
    with proxy.connect() as connection:
        connection.sendall(f"POST {PATH} HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n".encode())
        for start in range(0, len(data), 40):
            piece = data[start : start + 40]
            connection.sendall(b"%x\r\n%b\r\n" % (len(piece), piece))
        connection.sendall(b"0\r\n\r\n")
        head, rest = _response(connection)
        assert head.startswith(b"HTTP/1.1 200")
        assert len(json.loads(rest)["choices"][0]["token_ids"]) == 3


def test_tokens_are_sent_when_they_are_there_and_not_at_the_end(scripted_proxy):
    # 30 tokens, one every 30 ms.
    sent = body([Behaviour.SLOW, 3], 30, stream=True, **GREEDY)
    times = []
    with httpx.stream("POST", f"{scripted_proxy.url}{PATH}", json=sent, timeout=60) as response:
        times += [time.monotonic() for line in response.iter_lines() if line.startswith("data: {")]
    assert len(times) == 30
    assert times[-1] - times[0] > 0.4


def test_a_client_that_leaves_takes_its_call_out_of_the_engine(scripted_proxy, scripted_worker):
    for stream in (False, True):
        data = json.dumps(body([Behaviour.SILENT], 3, stream=stream)).encode()
        with scripted_proxy.connect() as connection:
            connection.sendall(b"POST %b HTTP/1.1\r\nhost: t\r\ncontent-length: %d\r\n\r\n%b" % (PATH.encode(), len(data), data))
            wait_for(lambda: scripted_worker.running_requests() == 1)
        wait_for(lambda: scripted_worker.running_requests() == 0 and scripted_proxy.in_flight() == 0)


def _response(connection):
    """Head and body of a response with a content-length."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += connection.recv(65536)
    head, _, rest = received.partition(b"\r\n\r\n")
    length = next(int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    while len(rest) < length:
        rest += connection.recv(65536)
    return head, rest
