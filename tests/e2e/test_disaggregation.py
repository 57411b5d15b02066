"""One prefill and one decode worker with real engines, between which NIXL carries real KV blocks.

The output is that of one worker, and whenever its client dies, both engines are idle soon and have their blocks back.
"""

import json
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import Any

import httpx
import pytest

from tests import workers
from tests.e2e.replies import PATH, Said, ask, body
from tests.proxy import RunningProxy, headrace, wait_for
from tests.workers import RunningWorker

pytestmark = pytest.mark.real

#: Seconds that vLLM keeps a prefill's blocks for nobody. What must not wait for that has half of it.
LEASE = 60
SOON = 30
_MEETING = 120
#: More than one block (128 tokens on a CPU), and a part of one.
PROMPT = [(7 * place) % 250 + 1 for place in range(300)]
#: Takes the engine a second or more.
LONG = [(11 * place) % 250 + 1 for place in range(1800)]

Pair = tuple[RunningProxy, RunningWorker, RunningWorker]


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    if reason := workers.why_no_hand_over():
        pytest.skip(f"no engines here that hand over: {reason}")
    with (
        workers.handing_engine(lease=LEASE) as prefill,
        workers.handing_engine(lease=LEASE) as decode,
        headrace(prefill, decode, roles=("prefill", "decode")) as proxy,
    ):
        wait_for(lambda: _have_met(proxy), _MEETING)
        yield proxy, prefill, decode


def _have_met(proxy: RunningProxy) -> bool:
    """Whether the engines have shaken hands: with the first hand-over, for which vLLM gives them 5 s, too few on a busy machine."""
    sent = call(PROMPT, 1, "met")
    return httpx.post(f"{proxy.url}{PATH}", json=sent, timeout=300, trust_env=False).status_code == HTTPStatus.OK


def fetched(decode: RunningWorker) -> float:
    """Prompt tokens that have come from another engine."""
    return decode.metric("vllm:prompt_tokens_by_source_total", source="external_kv_transfer")


def kept(worker: RunningWorker) -> float:
    return worker.metric("vllm:kv_cache_usage_perc")


def expired(worker: RunningWorker) -> float:
    return worker.metric("vllm:nixl_num_kv_expired_reqs_total")


def wait_until_idle(pair: Pair) -> None:
    """Both engines have no request and no block in use, and no lease had to end for that."""
    proxy, prefill, decode = pair
    wait_for(lambda: not proxy.in_flight(), SOON)
    for worker in (prefill, decode):
        wait_for(lambda worker=worker: not worker.running_requests() and not kept(worker), SOON)
        assert expired(worker) == 0


def call(prompt: list[int], tokens: int, salt: str, *, stream: bool = False, **sampling: Any) -> dict[str, Any]:
    """A greedy call that shares nothing with those of other salts, and has this id."""
    sent = body(prompt, tokens, stream=stream, temperature=0.0, skip_reading_prefix_cache=False, **sampling)
    return sent | {"cache_salt": salt, "request_id": salt}


@pytest.mark.parametrize("stream", [False, True])
def test_the_output_is_that_of_one_worker_and_the_blocks_have_moved(pair: Pair, stream: bool):
    proxy, _, decode = pair
    before = fetched(decode)
    said = ask(proxy.url, call(PROMPT, 8, f"moved-{stream}", stream=stream))
    alone = ask(decode.http, call(PROMPT, 8, f"alone-{stream}"))
    assert (said.tokens, said.finish_reason) == (alone.tokens, alone.finish_reason)
    assert _numbers(said) == pytest.approx(_numbers(alone), abs=1e-4)
    wait_for(lambda: fetched(decode) == before + len(PROMPT), SOON)
    wait_until_idle(pair)


def _numbers(said: Said) -> list[float]:
    return [struct.unpack("<f", logprob)[0] for logprob in said.logprobs]


def test_the_prompts_logprobs_are_those_of_one_worker(pair: Pair):
    proxy, prefill, _ = pair
    said = ask(proxy.url, call(PROMPT, 2, "scored", prompt_logprobs=1))
    assert said.prompt == ask(prefill.http, call(PROMPT, 2, "scored alone", prompt_logprobs=1)).prompt
    assert len(said.prompt) == len(PROMPT)
    wait_until_idle(pair)


def send(proxy: RunningProxy, sent: dict[str, Any]) -> socket.socket:
    data = json.dumps(sent).encode()
    connection = proxy.connect()
    connection.sendall(f"POST /inference/v1/generate HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
    return connection


def die(connection: socket.socket) -> None:
    """Reset the connection, as a process that is killed does."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    connection.close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_dies_while_its_prompt_is_computed_leaves_nothing_behind(pair: Pair, stream: bool):
    proxy, _, decode = pair
    before = fetched(decode)
    connection = send(proxy, call(LONG, 100, f"early-{stream}", stream=stream))
    wait_for(lambda: _in_flight(proxy)["w0"], SOON)
    die(connection)
    wait_until_idle(pair)
    assert fetched(decode) == before


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_dies_between_prefill_and_first_output_leaves_nothing_behind(pair: Pair, stream: bool):
    proxy, _, decode = pair
    before = fetched(decode)
    name = f"between-{stream}"
    connection = send(proxy, call(LONG, 200, name, stream=stream))
    wait_for(lambda: any(leg["id"] == name for leg in proxy.events("leg.settled")), SOON)
    die(connection)
    wait_until_idle(pair)
    assert proxy.settled(name)["outcome"] == "client-gone"
    wait_for(lambda: fetched(decode) == before + len(LONG), SOON)


def test_a_client_that_dies_in_the_middle_of_its_output_leaves_nothing_behind(pair: Pair):
    proxy, _, _ = pair
    connection = send(proxy, call(PROMPT, 1500, "late", stream=True))
    received = b""
    while b'"token_ids"' not in received:
        received += connection.recv(65536)
    die(connection)
    wait_until_idle(pair)
    settled = proxy.settled("late")
    assert settled["outcome"] == "client-gone"
    assert 0 < settled["output"] < 1500


def test_a_pause_between_prefill_and_decode_leaves_nothing_behind(pair: Pair):
    proxy, prefill, decode = pair
    before = fetched(decode)
    with ThreadPoolExecutor() as threads:
        sent = threads.submit(ask, proxy.url, call(LONG, 8, "paused"))
        wait_for(lambda: _in_flight(proxy)["w0"], SOON)
        _administer(proxy, "/workers/w1/pause?mode=keep")
        wait_for(lambda: any(leg["id"] == "paused" for leg in proxy.events("leg.settled")), SOON)
        assert kept(prefill) > 0
        _administer(proxy, "/workers/w1/resume")
        assert len(sent.result().tokens) == 8
    wait_until_idle(pair)
    # The hand-off from before, only for its blocks to be freed, and the one from after.
    wait_for(lambda: fetched(decode) == before + 2 * len(LONG), SOON)


def test_blocks_that_nobody_fetches_are_what_this_would_look_like(pair: Pair):
    """The other tests can fail: a prefill whose decode never comes keeps its blocks."""
    _, prefill, _ = pair
    params = {"do_remote_decode": True, "do_remote_prefill": False}
    ask(prefill.http, call(PROMPT, 1, "nobody") | {"kv_transfer_params": params})
    time.sleep(2)
    assert kept(prefill) > 0


def _administer(proxy: RunningProxy, path: str) -> None:
    httpx.post(f"{proxy.url}{path}", timeout=60, trust_env=False).raise_for_status()


def _in_flight(proxy: RunningProxy) -> dict[str, int]:
    return {worker["id"]: worker["in_flight"] for worker in proxy.fleet()}
