"""Adapters through a real headrace, in front of each kind of worker, over either wire; and what reaches the engine."""

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import workers
from tests.proxy import Wires, headrace, wait_for
from tests.workers import RunningWorker

SETTINGS = '[plugins.lora]\nallowed_paths = ["/"]'
PROMPT = [72, 101, 108, 108, 111]


class Client:
    """A client of headrace, and of the worker behind it."""

    def __init__(self, http: httpx.Client, *behind: RunningWorker) -> None:
        self.workers = behind
        self._http = http

    def get(self, path: str) -> Any:
        return self._http.get(path).raise_for_status().json()

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self._http.post(path, json=body)

    def load(self, name: str, path: Path, **more: Any) -> httpx.Response:
        return self.post("/v1/load_lora_adapter", lora_name=name, lora_path=str(path), **more)

    def unload(self, name: str) -> httpx.Response:
        return self.post("/v1/unload_lora_adapter", lora_name=name)

    def tokens(self, **fields: Any) -> list[int]:
        """Twelve greedy tokens."""
        sampling = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
        response = self.post("/inference/v1/generate", token_ids=PROMPT, sampling_params=sampling, **fields)
        return response.raise_for_status().json()["choices"][0]["token_ids"]

    def status(self, **fields: Any) -> int:
        return self.post("/inference/v1/generate", token_ids=PROMPT, sampling_params={"max_tokens": 1}, **fields).status_code

    def held(self) -> list[list[str]]:
        """What each worker lists, beside its model."""
        cards = [httpx.get(f"{worker.http}/v1/models").json()["data"] for worker in self.workers]
        return [sorted(card["id"] for card in some if card["parent"]) for some in cards]

    def clear(self) -> None:
        """No adapter is left."""
        for adapter in self.get("/v1/loras")["loras"]:
            self.unload(adapter["lora_name"]).raise_for_status()
        wait_for(lambda: not any(self.held()))


@contextmanager
def serving(*behind: RunningWorker, wires: Wires = "both") -> Iterator[Client]:
    """A client of a headrace of its own."""
    with headrace(*behind, wires=wires, settings=SETTINGS) as proxy, httpx.Client(base_url=proxy.url, timeout=60) as http:
        yield Client(http, *behind)


@pytest.fixture(scope="module", params=["both", "http"])
def opened(request: pytest.FixtureRequest, worker: RunningWorker) -> Iterator[Client]:
    with serving(worker, wires=request.param) as client:
        yield client


@pytest.fixture
def client(opened: Client) -> Iterator[Client]:
    yield opened
    opened.clear()


def write_adapter(folder: Path, kind: str, scale: int) -> Path:
    """An adapter that the worker can load; its effect depends on `scale`."""
    if kind == "engine":
        shutil.copytree(workers.adapter(), folder)
        config = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": config["lora_alpha"] * scale}))
    else:
        folder.mkdir()
        (folder / "adapter_config.json").write_text("{}")
    return folder


@pytest.fixture
def one(client, tmp_path) -> Path:
    return write_adapter(tmp_path / "one", client.workers[0].kind, 1)


@pytest.fixture
def two(client, tmp_path) -> Path:
    return write_adapter(tmp_path / "two", client.workers[0].kind, 3)


def test_two_adapters_and_the_model_give_three_outputs(client, one, two):
    plain = client.tokens()
    assert client.load("one", one).text == "Success: LoRA adapter 'one' added successfully."
    client.load("two", two).raise_for_status()
    outputs = [client.tokens(model="one"), client.tokens(lora_name="two"), client.tokens()]
    assert outputs[2] == plain
    assert len({tuple(tokens) for tokens in outputs}) == 3
    assert client.tokens(model="one") == outputs[0]


def test_a_trainer_that_asks_each_worker_means_all(client, one):
    for _ in range(2):
        reply = client.post("/workers/w0/load_lora_adapter", lora_name="math", lora_path=str(one))
        assert (reply.status_code, reply.json()) == (200, {"status": "ok"})
    assert client.held() == [["math"]]
    assert client.post("/workers/w7/load_lora_adapter", lora_name="math", lora_path=str(one)).status_code == 404


def test_a_reload_in_place_changes_the_output_of_the_next_call(client, one, two):
    client.load("reloaded", one).raise_for_status()
    before = client.tokens(model="reloaded")
    assert client.load("reloaded", two).status_code == 400
    assert client.tokens(model="reloaded") == before
    client.load("reloaded", two, load_inplace=True).raise_for_status()
    after = client.tokens(model="reloaded")
    assert after != before
    wait_for(lambda: client.held() == [["reloaded@1"]])
    if client.workers[0].kind != "scripted":  # whose tokens depend on the name
        client.load("another", two).raise_for_status()
        assert client.tokens(model="another") == after


def test_a_call_in_flight_finishes_on_the_version_that_it_began_with(client, one, two):
    worker = client.workers[0]
    if worker.kind != "engine":
        pytest.skip("it answers too fast to be caught in the middle")
    client.load("flying", one).raise_for_status()
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 1200, "temperature": 0, "ignore_eos": True}, "model": "flying"}
    expected = client.post("/inference/v1/generate", **body).raise_for_status().json()["choices"]
    with ThreadPoolExecutor() as pool:
        flying = pool.submit(client.post, "/inference/v1/generate", **body)
        wait_for(worker.running_requests)
        client.load("flying", two, load_inplace=True).raise_for_status()
        assert not flying.done()
        assert client.held() == [["flying", "flying@1"]]
        assert flying.result().json()["choices"] == expected
    wait_for(lambda: client.held() == [["flying@1"]])
    assert client.post("/inference/v1/generate", **body).json()["choices"] != expected


def test_a_reloaded_adapter_reads_no_blocks_of_the_version_before(client, one, two):
    def cached() -> int | None:
        body = {"token_ids": list(range(72, 272)), "sampling_params": {"max_tokens": 1}, "model": "cached"}
        details = client.post("/inference/v1/generate", **body).raise_for_status().json()["usage"]["prompt_tokens_details"]
        return details and details["cached_tokens"]

    client.load("cached", one).raise_for_status()
    if cached() is None:
        pytest.skip("vLLM 0.31 doesn't tell, and neither does 0.33 over HTTP")
    assert (cached() or 0) > 0
    client.load("cached", two, load_inplace=True).raise_for_status()
    assert cached() == 0


def test_an_unloaded_adapter_is_gone_from_the_worker_too(client, one):
    client.load("unloaded", one).raise_for_status()
    assert client.held() == [["unloaded"]]
    assert client.unload("unloaded").text == "Success: LoRA adapter 'unloaded' removed successfully."
    assert client.held() == [[]]
    assert client.status(model="unloaded") == 404
    assert client.unload("unloaded").status_code == 404


def test_an_adapter_can_have_the_models_own_name(client, one):
    name = client.workers[0].model
    plain = client.tokens()
    assert client.post("/load_lora_adapter", lora_name=name, lora_path=str(one)).json() == {"status": "ok"}
    assert client.tokens() == client.tokens(model=name) != plain
    assert [card["id"] for card in client.get("/v1/models")["data"]] == [name]
    client.unload(name).raise_for_status()
    assert client.tokens(model=name) == plain


def test_models_lists_it_with_the_models_length(client, one):
    worker = client.workers[0]
    client.load("one", one).raise_for_status()
    card = client.get("/v1/models")["data"][-1]
    assert {key: card[key] for key in ("id", "root", "parent", "max_model_len")} == {
        "id": "one",
        "root": str(one),
        "parent": worker.model,
        "max_model_len": worker.max_model_len,
    }


def test_what_is_not_there_is_a_404(client, tmp_path):
    assert client.load("one", tmp_path / "none").status_code == 404
    assert client.post("/load_lora_adapter", lora_name="one", lora_path=str(tmp_path / "none")).status_code == 404
    assert client.status(model="one") == 404


# --- what reaches the engine --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair() -> Iterator[Client]:
    """Two real servers with scripted engines."""
    if reason := workers.why_not("scripted"):
        pytest.skip(f"no scripted worker here: {reason}")
    with workers.scripted() as a, workers.scripted() as b, serving(a, b) as client:
        yield client


@pytest.fixture
def both(pair: Client) -> Iterator[Client]:
    yield pair
    pair.clear()
    for worker in pair.workers:  # afterwards: the engines forget their adapters by it, and the servers don't
        worker.order("script_reset")


def utilities(worker: RunningWorker, since: int) -> list[tuple[Any, ...]]:
    """The adapters that an engine was told to load (name, path) and how many to unload, in order."""
    events = [event for event in worker.engine_events()[since:] if event["event"] == "utility"]
    told: list[tuple[Any, ...]] = []
    for event in events:
        if event["method"] == "add_lora":
            name, _, path, *flags = event["args"][0]
            told.append(("add", name, path, any(flag is True for flag in flags)))
        elif event["method"] == "remove_lora":
            told.append(("remove",))
    return told


@pytest.mark.real
def test_a_reload_is_a_new_name_on_every_engine_and_then_the_end_of_the_old(both, tmp_path):
    one, two = (write_adapter(tmp_path / name, "scripted", 1) for name in ("one", "two"))
    since = [len(worker.engine_events()) for worker in both.workers]
    both.load("step", one).raise_for_status()
    both.post("/load_lora_adapter", lora_name="step", lora_path=str(two)).raise_for_status()
    expected = [("add", "step", str(one), False), ("add", "step@1", str(two), False), ("remove",)]
    wait_for(lambda: [utilities(worker, start) for worker, start in zip(both.workers, since, strict=True)] == [expected] * 2)


@pytest.mark.real
def test_the_engine_gets_the_adapter_and_the_callers_own_salt(both, tmp_path):
    both.load("salty", write_adapter(tmp_path / "one", "scripted", 1)).raise_for_status()
    both.tokens(model="salty", cache_salt="7", request_id="salted")
    adds = [event for worker in both.workers for event in worker.engine_events("add") if "salted" in str(event["request_id"])]
    [event] = adds
    assert (event["lora_request"][0], event["cache_salt"]) == ("salty", "7")


@pytest.mark.real
def test_when_one_engine_refuses_the_other_is_taken_back(both, tmp_path):
    one = write_adapter(tmp_path / "one", "scripted", 1)
    since = len(both.workers[0].engine_events())
    both.workers[1].order("script_fail", "add_lora")
    response = both.load("half", one)
    assert response.status_code == 500
    assert "w1: " in response.json()["error"]["message"]
    assert both.held() == [[], []]
    assert both.status(model="half") == 404
    assert utilities(both.workers[0], since) == [("add", "half", str(one), False), ("remove",)]
    both.workers[1].order("script_reset")
    both.load("half", one).raise_for_status()
    assert both.held() == [["half@1"], ["half@1"]]


@pytest.mark.real
def test_a_restarted_headrace_goes_on_with_what_the_engines_have(both, tmp_path):
    both.load("math", write_adapter(tmp_path / "one", "scripted", 1)).raise_for_status()
    with serving(*both.workers) as again:
        assert again.get("/v1/loras") == both.get("/v1/loras")
        assert again.tokens(model="math") == both.tokens(model="math")
