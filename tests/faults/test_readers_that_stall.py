"""A client that stops reading, but stays connected: its call is given up after `stall_timeout`, and the engine is free."""

import socket

import pytest

from tests import workers
from tests.faults.clients import body, call, raw, read_until
from tests.proxy import HOSTS, headrace, wait_for
from tests.workers.scripted_engine import Behaviour

SETTINGS = "[server]\nstall_timeout = 1\n"
#: A token every 10 ms for 40 s, with so many candidates that no buffer on the way holds them.
LARGE = body([Behaviour.SLOW, 1], 4000, stream=True, logprobs=-1)


@pytest.fixture(scope="module")
def worker():
    with workers.scripted(max_model_len=8192, server_arguments=["--max-logprobs", "-1"]) as worker:
        yield worker


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("wire", ["grpc", "http"])
def test_a_stalled_reader_releases_the_engine(worker, host, wire):
    with headrace(worker, host=host, wires=wire, settings=SETTINGS) as proxy, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(30)
        connection.connect(("127.0.0.1", proxy.port))
        connection.sendall(raw(LARGE, "stalled"))
        read_until(connection, b"data: {")
        assert worker.running_requests() == 1
        wait_for(lambda: worker.running_requests() == 0, 20)
        assert call(proxy, body(b"Hello", 3)).status_code == 200
        if host == "serve":
            # Hypercorn's own workers keep the task of such a connection until the kernel gives it up.
            wait_for(lambda: proxy.in_flight() == 0)
            assert proxy.settled("stalled")["outcome"] == "client-gone"


def test_a_slow_reader_is_no_stalled_one(worker):
    with headrace(worker, settings=SETTINGS) as proxy, proxy.connect() as connection:
        connection.sendall(raw(body([Behaviour.SLOW, 10], 25, stream=True), "slow"))
        assert read_until(connection, b"data: [DONE]").count(b"data: {") == 25
        assert proxy.settled("slow")["outcome"] == "ok"
