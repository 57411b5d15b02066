"""Prime-RL's orchestrator, request by request as its client sends them, in front of real servers of one rank and of three."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest

from tests import workers
from tests.faults.clients import raw
from tests.proxy import RunningProxy, Wires, headrace, wait_for
from tests.workers import RunningWorker
from tests.workers.scripted_engine.behaviour import Behaviour

pytestmark = pytest.mark.real

METHODS = ["init_broadcaster", "update_weights_from_path"]
INIT = {"host": "trainer", "port": 29501, "rank_offset": 0, "timeout": 1200, "quantize_in_weight_transfer": False}
IN_FLIGHT = 400

Pair = tuple["Trainer", RunningWorker, RunningWorker]


class Trainer:
    """The orchestrator's admin client: few connections, no time-out of its own, a bearer token."""

    def __init__(self, proxy: RunningProxy) -> None:
        self.proxy = proxy
        self.http = httpx.Client(
            base_url=proxy.url,
            headers={"Authorization": "Bearer key", "Accept-Encoding": "gzip, deflate"},
            limits=httpx.Limits(max_connections=4, max_keepalive_connections=1),
            timeout=None,
            trust_env=False,
        )

    def post(self, path: str, body: Any = None, *, read: float = 300.0, **query: str) -> httpx.Response:
        timeout = httpx.Timeout(connect=10.0, read=read, write=60.0, pool=10.0)
        return self.http.post(path, json=body, params=query, timeout=timeout)

    def pause(self) -> None:
        self.post("/pause", mode="keep", clear_cache="false").raise_for_status()

    def resume(self) -> None:
        self.post("/resume").raise_for_status()

    def update(self, folder: str | None, *, read: float = 720.0) -> httpx.Response:
        return self.post("/update_weights", {"weight_dir": folder}, read=read)


@contextmanager
def opened_over(wires: Wires) -> Iterator[Pair]:
    if reason := workers.why_not("scripted"):
        pytest.skip(f"no scripted worker here: {reason}")
    with (
        workers.scripted(extension_methods=METHODS, max_num_seqs=IN_FLIGHT) as one,
        workers.scripted(extension_methods=METHODS, max_num_seqs=IN_FLIGHT, world_size=3) as three,
        headrace(one, three, wires=wires, settings="[probe]\ninterval = 0.1\n") as proxy,
    ):
        trainer = Trainer(proxy)
        yield trainer, one, three
        trainer.http.close()


@pytest.fixture(scope="module", params=["both", "http"])
def opened(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with opened_over(request.param) as pair:
        yield pair


@pytest.fixture
def fresh() -> Iterator[Pair]:
    """Workers that have joined no group."""
    with opened_over("both") as pair:
        yield pair


@pytest.fixture
def pair(opened: Pair) -> Iterator[Pair]:
    trainer, *both = opened
    yield opened
    trainer.resume()
    for worker in both:
        worker.order("script_reset")


def calls(worker: RunningWorker, method: str, since: int = 0) -> list[dict[str, Any]]:
    """Calls of a method that have reached the engine, after its first `since` events."""
    events = worker.engine_events()[since:]
    return [event for event in events if event.get("method") == "collective_rpc" and event["args"][0] == method]


def arguments(worker: RunningWorker, method: str, since: int) -> list[tuple[Any, Any]]:
    return [(call["args"][2], call["args"][3]) for call in calls(worker, method, since)]


def now(*both: RunningWorker) -> list[int]:
    return [len(worker.engine_events()) for worker in both]


def init_of(events: int, worker: RunningWorker) -> Any:
    [(_, kwargs)] = arguments(worker, "init_broadcaster", events)
    return kwargs


@pytest.mark.parametrize("more", [{}, {"session_id": "run-1", "port": 8001}, {"engine_world_size": 4}])
def test_the_workers_join_at_the_same_time_each_at_its_place(pair, more):
    trainer, *both = pair
    events = now(*both)
    for worker in both:
        worker.order("script_stall", "init_broadcaster", 2.0)
    body = {**INIT, "inference_world_size": 4, **more}
    replies: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: replies.append(trainer.post("/init_broadcaster", body)))
    thread.start()
    wait_for(lambda: [one["missing"] for one in httpx.get(f"{trainer.proxy.url}/fleet").json()["operations"]] == [["w0", "w1"]])
    wait_for(lambda: all(calls(worker, "init_broadcaster", since) for worker, since in zip(both, events, strict=True)))
    thread.join(30)
    assert [(reply.status_code, reply.json()) for reply in replies] == [(200, {"status": "ok"})]
    told = [init_of(since, worker) for worker, since in zip(both, events, strict=True)]
    assert [one["rank_offset"] for one in told] == [0, 1]
    assert [one["inference_world_size"] for one in told] == [4, 4]
    assert [one.get("engine_world_size") for one in told] == ([1, 3] if "engine_world_size" in more else [None, None])


def test_a_wrong_count_is_refused_with_both_numbers(pair):
    trainer, *both = pair
    events = now(*both)
    reply = trainer.post("/init_broadcaster", {**INIT, "inference_world_size": 2})
    assert reply.status_code == 400
    assert "the trainer counts 2 ranks, and the fleet has 4 (w0 1, w1 3)" in reply.json()["error"]["message"]
    assert trainer.update(None).status_code == 409, "for a trainer that has looked away"
    assert [calls(worker, "init_broadcaster", since) for worker, since in zip(both, events, strict=True)] == [[], []]


def test_one_step(pair):
    trainer, *both = pair
    events = now(*both)
    assert trainer.http.get("/health").status_code == 200
    assert [card["id"] for card in trainer.http.get("/v1/models").json()["data"]] == ["tiny"]
    trainer.pause()
    assert set(trainer.proxy.states().values()) == {"paused"}
    reply = trainer.update("/out/broadcasts/step_7")
    trainer.resume()
    assert (reply.status_code, reply.json()) == (200, {"status": "ok"})
    assert "content-encoding" not in reply.headers
    sent = [arguments(worker, "update_weights_from_path", since) for worker, since in zip(both, events, strict=True)]
    assert sent == [[(["/out/broadcasts/step_7"], {})]] * 2
    assert [worker["policy_version"] for worker in trainer.proxy.fleet()] == ["7", "7"]


def test_an_update_that_is_posted_again_joins_the_one_that_runs(pair):
    trainer, *both = pair
    trainer.pause()
    events = now(*both)
    both[1].order("script_stall", "update_weights_from_path", 1.5)
    with pytest.raises(httpx.ReadTimeout):
        trainer.update("/out/step_8", read=0.5)
    assert trainer.update("/out/step_8").status_code == 200
    assert [len(calls(w, "update_weights_from_path", since)) for w, since in zip(both, events, strict=True)] == [1, 1]


def test_a_worker_that_fails_once_fails_the_update_and_the_next_try_heals_it(fresh):
    trainer, *both = fresh
    trainer.pause()
    both[1].order("script_fail", "update_weights_from_path")
    assert trainer.update("/out/step_9").status_code == 500
    assert trainer.update("/out/step_9").status_code == 200
    trainer.resume()
    assert trainer.proxy.states() == {"w0": "ready", "w1": "ready"}


def test_admin_calls_do_not_queue_behind_rollouts(pair):
    trainer, *_ = pair
    rollout = raw({"token_ids": [Behaviour.SILENT, 65], "sampling_params": {"max_tokens": 2}})
    with ExitStack() as connections:
        for _ in range(IN_FLIGHT):
            connections.enter_context(trainer.proxy.connect()).sendall(rollout)
        wait_for(lambda: trainer.proxy.in_flight() == IN_FLIGHT, 60)
        trainer.pause()
        trainer.update("/out/step_1").raise_for_status()
        trainer.resume()
        entries = trainer.http.get("/fleet/journal").json()["entries"]
        seconds = {entry["what"]: entry["detail"]["seconds"] for entry in reversed(entries) if "seconds" in entry["detail"]}
        assert seconds["pause"] + seconds["collective_rpc update_weights_from_path"] + seconds["resume"] < 10
        assert trainer.proxy.in_flight() == IN_FLIGHT
    wait_for(lambda: trainer.proxy.in_flight() == 0, 60)
