"""Two hundred clients at once, of which half leave at random: nothing leaks, and the other half gets its answers."""

import json
import random
from pathlib import Path

import httpx
import pytest
import trio

from tests.faults.clients import PATH, body, raw
from tests.proxy import wait_for
from tests.workers.scripted_engine import Behaviour

CLIENTS = 200
#: A token every 10 ms, 30 of them.
TOKENS = 30
LONGEST_STAY = 0.5


def prompt(number):
    return [Behaviour.SLOW, 1, *f"client {number % 20}".encode()]


def descriptors(pid):
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


@pytest.mark.parametrize("seed", [1, 2])
async def test_nothing_leaks_and_the_others_are_answered(scripted_proxy, scripted_worker, seed):
    expected = {}
    async with httpx.AsyncClient(base_url=scripted_worker.http, timeout=60, trust_env=False) as direct:
        for number in range(20):
            reply = await direct.post(PATH, json=body(prompt(number), TOKENS))
            expected[number] = reply.json()["choices"][0]["token_ids"]
    chance = random.Random(seed)
    stays = [chance.uniform(0, LONGEST_STAY) if chance.random() < 0.5 else None for _ in range(CLIENTS)]
    before = descriptors(scripted_proxy.pid)
    wrong = []

    async def client(number):
        stream = number % 2 == 0
        connection = await trio.open_tcp_stream("127.0.0.1", scripted_proxy.port)
        received = None
        async with connection:
            with trio.move_on_after(60 if stays[number] is None else stays[number]):
                await connection.send_all(raw(body(prompt(number), TOKENS, stream=stream)))
                received = await _response(connection, stream)
            if stays[number] is None and received != expected[number % 20]:
                wrong.append(number)

    with trio.fail_after(120):
        async with trio.open_nursery() as nursery:
            for number in range(CLIENTS):
                nursery.start_soon(client, number)
    assert wrong == []
    await trio.to_thread.run_sync(lambda: wait_for(lambda: scripted_worker.running_requests() == 0, 30))
    await trio.to_thread.run_sync(lambda: wait_for(lambda: scripted_proxy.in_flight() == 0, 30))
    # Connections to the worker may be kept for the next calls; those of the clients are gone.
    await trio.to_thread.run_sync(lambda: wait_for(lambda: descriptors(scripted_proxy.pid) < before + CLIENTS / 4, 30))


async def _response(connection, stream):
    """The tokens of a response, whatever way its body is framed."""
    data = b""
    end = b"data: [DONE]" if stream else None
    while True:
        received = await connection.receive_some(65536)
        assert received
        data += received
        head, separator, rest = data.partition(b"\r\n\r\n")
        if end and end in data:
            lines = [line for line in rest.split(b"\n") if line.startswith(b"data: {")]
            return [token for line in lines for token in json.loads(line[6:])["choices"][0]["token_ids"]]
        if not end and separator:
            length = next(int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            if len(rest) >= length:
                return json.loads(rest)["choices"][0]["token_ids"]
