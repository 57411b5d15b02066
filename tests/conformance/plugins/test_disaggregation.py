"""Prefill and decode workers behind a real headrace: one reply, equal to that of one worker, and nothing left behind when a client dies."""

import contextlib
import json
import signal
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests import workers
from tests.conformance.plugins.handing import PAIR, PATH, PROMPT, ask, body, in_flight, kept, legs, tokens
from tests.proxy import RunningProxy, Wires, headrace, wait_for
from tests.workers import RunningWorker

#: Seconds that stand-ins take: for a prompt and for blocks, long enough to be met on a slow machine, and for a token.
READ, FETCH, TOKEN = 1.0, 2.0, 0.05


@pytest.fixture(scope="module")
def stand_ins() -> Iterator[tuple[RunningWorker, RunningWorker]]:
    with workers.stand_in() as first, workers.stand_in() as second:
        yield first, second


@pytest.fixture(scope="module", params=["both", "grpc", "http"])
def pair(request: pytest.FixtureRequest, stand_ins: tuple[RunningWorker, RunningWorker]) -> Iterator[RunningProxy]:
    wires: Wires = request.param
    with headrace(*stand_ins, roles=PAIR, wires=wires) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def slow() -> Iterator[tuple[RunningProxy, RunningWorker, RunningWorker]]:
    with (
        workers.stand_in(token_delay=READ, kv_lease=60) as first,
        workers.stand_in(token_delay=TOKEN, kv_transfer_delay=FETCH, kv_lease=60) as second,
        headrace(first, second, roles=PAIR, settings="[server]\nkeep_alive_interval = 0.1") as proxy,
    ):
        yield proxy, first, second


@pytest.fixture(scope="module")
def scripted() -> Iterator[tuple[RunningProxy, RunningWorker, RunningWorker]]:
    if reason := workers.why_not("scripted"):
        pytest.skip(f"no scripted worker here: {reason}")
    with (
        workers.scripted(routed_experts=True) as first,
        workers.scripted(routed_experts=True) as second,
        headrace(first, second, roles=PAIR) as proxy,
    ):
        yield proxy, first, second


@pytest.mark.parametrize("stream", [False, True])
def test_the_output_is_that_of_one_worker(pair, stand_ins, stream):
    first, second = stand_ins
    _, alone = ask(first.http, body())
    response, replies = ask(pair.url, body(stream=stream))
    assert tokens(replies) == tokens(alone)
    assert response.headers["x-headrace-route"] == "prefill=w0 (round-robin), decode=w1 (round-robin)"
    assert (kept(first), kept(second), pair.in_flight()) == (False, False, 0)


@pytest.mark.parametrize("stream", [False, True])
def test_the_prompts_logprobs_are_those_of_one_worker_over_any_wire(pair, stand_ins, stream):
    _, [alone] = ask(stand_ins[0].http, body(prompt_logprobs=1))
    _, replies = ask(pair.url, body(prompt_logprobs=1, stream=stream))
    told = replies[0]["prompt_logprobs"]
    assert [list(position or {}) for position in told] == [list(position or {}) for position in alone["prompt_logprobs"]]
    assert [list(position or {})[:1] for position in told[1:]] == [[str(token)] for token in PROMPT[1:]]


def test_the_usage_is_that_of_the_prefill(pair, stand_ins):
    sent = body() | {"cache_salt": f"usage-{pair.port}"}
    found = [ask(pair.url, sent)[1][0]["usage"] for _ in range(2)]
    assert {(usage["prompt_tokens"], usage["completion_tokens"]) for usage in found} == {(40, 4)}
    # Neither the stand-in's HTTP server nor vLLM's Rust server says what was cached; the hand-off does.
    assert [usage["prompt_tokens_details"] for usage in found] == [{"cached_tokens": 0}, {"cached_tokens": 32}]


@contextlib.contextmanager
def dying(proxy: RunningProxy, sent: dict[str, Any]) -> Iterator[None]:
    """Send a call, and reset its connection when the block ends, whatever has come by then."""
    data = json.dumps(sent).encode()
    head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
    with proxy.connect() as connection:
        connection.sendall(head.encode() + data)
        yield
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


def refuses(proxy: RunningProxy) -> bool:
    """Whether nobody can connect any more."""
    try:
        proxy.connect().close()
    except ConnectionRefusedError:
        return True
    return False


def wait_until_idle(proxy: RunningProxy, *workers: RunningWorker) -> None:
    """No worker has a call or a block in use, and no lease had to end for that."""
    wait_for(lambda: not proxy.in_flight())
    for worker in workers:
        wait_for(lambda worker=worker: not worker.running_requests() and not kept(worker))
        assert worker.metric("vllm:nixl_num_kv_expired_reqs_total") == 0
    assert "Traceback" not in proxy.log.read_text(encoding="utf-8")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_dies_while_its_prompt_is_computed_leaves_nothing_behind(slow, stream):
    proxy, first, second = slow
    name = f"early-{stream}"
    with dying(proxy, body(stream=stream) | {"request_id": name}):
        wait_for(lambda: in_flight(proxy, "w0"))
    wait_until_idle(proxy, first, second)
    assert [leg["outcome"] for leg in legs(proxy, name)] == ["cancelled"]
    assert proxy.settled(name)["outcome"] == "client-gone"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_dies_while_the_blocks_are_fetched_leaves_nothing_behind(slow, stream):
    proxy, first, second = slow
    name = f"between-{stream}"
    made = second.metric("vllm:generation_tokens_total")
    with dying(proxy, body(stream=stream, max_tokens=1000) | {"request_id": name}):
        wait_for(lambda: legs(proxy, name) and second.running_requests())
        assert (kept(first), second.metric("vllm:generation_tokens_total")) == (True, made)
    wait_until_idle(proxy, first, second)
    assert [leg["outcome"] for leg in legs(proxy, name)] == ["ok"]
    assert proxy.settled(name)["outcome"] == "client-gone"
    assert 0 < second.metric("vllm:generation_tokens_total") - made < 1000


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_dies_after_the_first_output_leaves_nothing_behind(slow, stream):
    proxy, first, second = slow
    name = f"late-{stream}"
    made = second.metric("vllm:generation_tokens_total")
    with dying(proxy, body(stream=stream, max_tokens=1000) | {"request_id": name}):
        wait_for(lambda: second.metric("vllm:generation_tokens_total") > made)
        assert not kept(first)
    wait_until_idle(proxy, first, second)
    assert proxy.settled(name)["outcome"] == "client-gone"
    assert second.metric("vllm:generation_tokens_total") - made < 1000


def test_headrace_stops_at_once_though_calls_are_held_for_clients_that_have_gone():
    with (
        workers.stand_in() as first,
        workers.stand_in(kv_transfer_delay=60) as second,
        headrace(first, second, roles=PAIR) as proxy,
    ):
        with dying(proxy, body() | {"request_id": "held"}):
            wait_for(lambda: legs(proxy, "held") and second.running_requests())
        assert proxy.in_flight() == 1
        proxy.send_signal(signal.SIGTERM)
        wait_for(lambda: refuses(proxy))  # or the second signal would be one with the first
        proxy.send_signal(signal.SIGTERM)
        assert proxy.ended(4) == 0


def test_calls_go_on_when_a_prefill_worker_dies_and_another_one_is_there():
    with (
        workers.stand_in() as first,
        workers.stand_in() as second,
        workers.stand_in() as other,
        headrace(first, second, other, roles=("prefill", "decode", "prefill")) as proxy,
    ):
        ask(proxy.url, body())
        first.send_signal(signal.SIGKILL)
        for _ in range(4):
            _, replies = ask(proxy.url, body())
            assert len(tokens(replies)) == 4
        assert proxy.in_flight() == 0


@pytest.mark.real
@pytest.mark.parametrize("stream", [False, True])
def test_what_the_prefill_returned_reaches_the_decodes_engine_as_it_is(scripted, stream):
    proxy, first, second = scripted
    before = len(first.engine_events()), len(second.engine_events())
    response, _ = ask(proxy.url, body(stream=stream) | {"request_id": f"verbatim-{stream}"})
    assert response.headers["x-headrace-worker"] == "w1"
    prefill = first.wait_for_event("add", since=before[0])
    decode = second.wait_for_event("add", since=before[1])
    assert prefill["sampling_params"]["max_tokens"] == 1
    asked, given = (added["sampling_params"]["extra_args"]["kv_transfer_params"] for added in (prefill, decode))
    assert (asked["do_remote_decode"], asked["do_remote_prefill"], asked["remote_port"]) == (True, False, None)
    assert (given["do_remote_prefill"], given["remote_port"], type(given["remote_port"])) == (True, 5600, int)
    assert given["remote_request_id"] == prefill["request_id"]
    assert {added["external_req_id"] for added in (prefill, decode)} == {f"verbatim-{stream}"}


@pytest.mark.real
@pytest.mark.parametrize("start", [None, 7, len(PROMPT)])
@pytest.mark.parametrize("stream", [False, True])
def test_rows_of_routed_experts_are_those_of_one_worker(scripted, start, stream):
    proxy, first, _ = scripted
    sent = body(routed_experts_prompt_start=start, stream=stream) | {"return_routed_experts": True}
    with headrace(first) as alone:
        _, expected = ask(alone.url, sent)
    _, replies = ask(proxy.url, sent)
    rows = replies[-1]["choices"][0]["routed_experts"]
    assert rows == expected[-1]["choices"][0]["routed_experts"]
    assert rows["shape"][0] == len(PROMPT) + 3 - (start or 0)
