"""The policy `kv` through a real headrace, in front of workers that publish KV events and of such that don't."""

import contextlib
import json
import re
import socket
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests import workers
from tests.conformance.ranks import Ranks
from tests.proxy import RunningProxy, headrace, wait_for
from tests.workers import Kind, RunningWorker
from tests.workers.processes import free_ports

BLOCK = 16
SETTINGS = '[routing]\npolicies = ["kv"]\n[probe]\ninterval = 0.1\n'
EVENTS = json.dumps({"enable_kv_cache_events": True, "endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0", "topic": "kv"})
PROMPT = [*range(40, 40 + 3 * BLOCK), 7]


@pytest.fixture
def publishers() -> Iterator[list[RunningWorker]]:
    with workers.stand_in(kv_events_config=EVENTS) as one, workers.stand_in(kv_events_config=EVENTS) as other:
        yield [one, other]


def ask(url: str, token_ids: Sequence[int], *, max_tokens: int = 2, **members: Any) -> httpx.Response:
    sampling = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
    body = {"token_ids": list(token_ids), "sampling_params": sampling, **members}
    reply = httpx.post(f"{url}/inference/v1/generate", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply


def route(reply: httpx.Response) -> tuple[str, str]:
    return reply.headers["x-headrace-worker"], reply.headers["x-headrace-route"]


def cached(reply: httpx.Response) -> int:
    return reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def metrics(proxy: RunningProxy) -> Counter[tuple[str, str]]:
    """The values that are counted by worker, by metric and worker."""
    text = httpx.get(f"{proxy.url}/metrics", timeout=10).text
    found = re.findall(r'^headrace_kv_(\w+)\{.*worker="(\w+)".*\} (\S+)$', text, re.MULTILINE)
    values: Counter[tuple[str, str]] = Counter()
    for name, worker, value in found:
        values[name, worker] += int(float(value))
    return values


@pytest.mark.parametrize("wires", ["both", "http"])
def test_what_a_worker_has_cached_is_known_and_found_also_from_before_headrace_came(publishers, wires):
    ask(publishers[1].http, PROMPT)
    with headrace(*publishers, settings=SETTINGS, wires=wires) as proxy:
        wait_for(lambda: metrics(proxy)["blocks", "w1"] == 3)
        reply = ask(proxy.url, [*PROMPT, 8])
        assert route(reply) == ("w1", "kv: 3 of 3 blocks")
        assert wires == "http" or cached(reply) == 3 * BLOCK  # over HTTP a worker doesn't tell


def test_later_turns_of_many_sessions_find_all_of_their_prefix(publishers):
    with headrace(*publishers, settings=SETTINGS) as proxy:
        sessions = [[first, *range(40, 40 + 3 * BLOCK)] for first in range(60, 70)]
        homes: list[str] = []
        for session in sessions:
            reply = ask(proxy.url, session, max_tokens=2 * BLOCK)
            homes.append(route(reply)[0])
            session += reply.json()["choices"][0]["token_ids"]
        assert Counter(homes) == {"w0": 5, "w1": 5}
        wait_for(lambda: metrics(proxy)["blocks", "w0"] + metrics(proxy)["blocks", "w1"] == 5 * len(sessions))
        for session, home in zip(sessions, homes, strict=True):
            reply = ask(proxy.url, [*session, *range(90, 90 + BLOCK)])
            assert route(reply) == (home, "kv: 5 of 6 blocks")
            assert cached(reply) == 5 * BLOCK


def test_a_group_that_comes_at_once_goes_to_one_worker(publishers):
    with headrace(*publishers, settings=SETTINGS) as proxy, ThreadPoolExecutor(8) as threads:
        replies = list(threads.map(lambda _: ask(proxy.url, PROMPT), range(8)))
    assert len({route(reply)[0] for reply in replies}) == 1
    assert sorted(map(cached, replies)) == [0, *[3 * BLOCK] * 7]


def test_a_salt_and_an_adapter_keep_blocks_apart(publishers, tmp_path):
    with headrace(*publishers, settings=f'{SETTINGS}[plugins.lora]\nallowed_paths = ["{tmp_path}"]') as proxy:
        body = {"lora_name": "math", "lora_path": str(tmp_path)}
        (tmp_path / "adapter_config.json").write_text("{}")
        (tmp_path / "adapter_model.safetensors").write_bytes(b"")
        httpx.post(f"{proxy.url}/v1/load_lora_adapter", json=body, timeout=60).raise_for_status()
        identities: list[dict[str, Any]] = [{}, {"cache_salt": "7"}, {"cache_salt": "8"}, {"lora_name": "math"}]
        homes = []
        for number, identity in enumerate(identities):
            reply = ask(proxy.url, PROMPT, **identity)
            homes.append(route(reply)[0])
            assert route(reply)[1] == "kv: 0 of 3 blocks"
            wait_for(lambda: metrics(proxy)["blocks", "w0"] + metrics(proxy)["blocks", "w1"] == 3 * (number + 1))  # noqa: B023
        for identity, home in zip(identities, homes, strict=True):
            reply = ask(proxy.url, PROMPT, **identity)
            assert (route(reply), cached(reply)) == ((home, "kv: 3 of 3 blocks"), 3 * BLOCK)


def test_evicted_and_reset_blocks_are_gone():
    with workers.stand_in(kv_events_config=EVENTS, cache_blocks=4) as worker, headrace(worker, settings=SETTINGS) as proxy:
        ask(proxy.url, PROMPT)
        ask(proxy.url, [*range(140, 140 + 3 * BLOCK), 7])
        wait_for(lambda: metrics(proxy)["events_total", "w0"] == 6 + 2)
        assert metrics(proxy)["blocks", "w0"] == 4
        httpx.post(f"{proxy.url}/reset_prefix_cache", timeout=60).raise_for_status()
        wait_for(lambda: metrics(proxy)["blocks", "w0"] == 0)


def test_a_worker_that_was_replaced_has_nothing():
    with workers.stand_in(kv_events_config=EVENTS) as worker:
        ports = {"grpc_port": int(worker.grpc.rpartition(":")[2]), "http_port": int(worker.http.rpartition(":")[2])}
        proxy = headrace(worker, settings=SETTINGS)
        running = proxy.__enter__()
        ask(running.url, PROMPT)
        wait_for(lambda: metrics(running)["blocks", "w0"] == 3)
    try:
        wait_for(lambda: running.states()["w0"] == "gone")
        with workers.stand_in(kv_events_config=EVENTS, **ports):
            wait_for(lambda: running.states()["w0"] == "ready")
            assert metrics(running)["blocks", "w0"] == 0
            reply = ask(running.url, PROMPT)
            assert (route(reply)[1], cached(reply)) == ("kv: 0 of 3 blocks", 0)
            wait_for(lambda: metrics(running)["blocks", "w0"] == 3)
    finally:
        proxy.__exit__(None, None, None)


def test_the_settings_say_where_a_worker_publishes_that_is_reached_elsewhere(publishers):
    told = httpx.get(f"{publishers[0].http}/kv_event_sources", timeout=10).json()["0"]
    source = f'[plugins.kv.sources.w0]\nendpoint = "{told["endpoint"]}"\nreplay = "{told["replay_endpoint"]}"\ntopic = "kv"\n'
    ask(publishers[0].http, PROMPT)
    with headrace(publishers[0], settings=SETTINGS + source) as proxy:
        wait_for(lambda: metrics(proxy)["blocks", "w0"] == 3)


def test_nobody_listens_to_events_before_a_call_needs_them(publishers):
    with headrace(*publishers, settings="[probe]\ninterval = 0.1\n") as proxy:
        ask(proxy.url, PROMPT)
        assert not proxy.events("kv.subscribed")


def test_a_worker_without_events_is_believed_to_have_what_was_sent_there(worker):
    with headrace(worker, settings=SETTINGS) as proxy:
        block = proxy.fleet()[0]["kv_block_size"]
        prompt = [40 + position % 200 for position in range(2 * block + 1)]
        salt = f"{time.time()}"
        assert route(ask(proxy.url, prompt, cache_salt=salt))[1] == "kv: 0 of 2 blocks"
        assert route(ask(proxy.url, prompt, cache_salt=salt))[1] == "kv: 2 of 2 blocks, guessed"
        assert route(ask(proxy.url, prompt, cache_salt=salt + "x"))[1] == "kv: 0 of 2 blocks"


@pytest.mark.parametrize("kind", ["stand-in", pytest.param("scripted", marks=pytest.mark.real)])
def test_of_a_worker_with_several_ranks_the_one_that_has_the_prompt_is_chosen(kind: Kind):
    if reason := workers.why_not(kind):
        pytest.skip(f"no {kind} worker here: {reason}")
    with publishing_ranks(kind) as worker, headrace(worker, settings=SETTINGS) as proxy:
        ranks = Ranks(worker)
        prompts, homes, later = [[60 + number, *PROMPT] for number in range(4)], [], []
        for number, prompt in enumerate(prompts):
            assert route(ask(proxy.url, prompt))[1] == "kv: 0 of 3 blocks"
            wait_for(lambda: metrics(proxy)["blocks", "w0"] == 3 * (number + 1))  # noqa: B023
            homes.append(ranks.since())
        assert sorted(homes) == [0, 0, 1, 1]
        for prompt in prompts:
            reply = ask(proxy.url, [*prompt, 8])
            assert (route(reply)[1], cached(reply)) == ("kv: 3 of 3 blocks", 3 * BLOCK)
            later.append(ranks.since())
        assert later == homes


def publishing_ranks(kind: Kind) -> contextlib.AbstractContextManager[RunningWorker]:
    """A worker of two ranks, of which the second publishes at the port after that of the first."""
    events, replay = (f"tcp://*:{port}" for port in adjacent_ports(2))
    if kind == "scripted":
        return workers.scripted(data_parallel_size=2, kv_events=events, kv_replay=replay)
    config = {"enable_kv_cache_events": True, "endpoint": events, "replay_endpoint": replay, "topic": "kv"}
    return workers.stand_in(data_parallel_size=2, kv_events_config=json.dumps(config))


def adjacent_ports(pairs: int) -> list[int]:
    """Ports that are free, and the next ones too: a second rank takes these."""
    found: list[int] = []
    while len(found) < pairs:
        [port] = free_ports(1)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port + 1)):
            if not any(abs(port - other) < 2 for other in found):
                found.append(port)
    return found
