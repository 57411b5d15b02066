"""Routing over a real fleet: policies by rules, changed while calls run, and explained."""

import json
import re
from collections import Counter
from collections.abc import Iterator

import httpx
import pytest
from click.testing import CliRunner

from core.cli import main
from tests import workers
from tests.conformance.through_headrace.calls import PATH, body
from tests.conformance.through_headrace.conftest import PROBES, client_of
from tests.proxy import RunningProxy, headrace, wait_for
from tests.workers import RunningWorker

ROUTING = """
[routing]
policies = ["least-loaded"]
[[routing.rules]]
model = "other"
policies = ["consistent-hash"]
"""


@pytest.fixture(scope="module")
def fleet() -> Iterator[tuple[RunningWorker, ...]]:
    """Three workers of one model, slow enough to be loaded, and one of another model."""
    with (
        workers.stand_in(served_model_name=["tiny"], token_delay=0.02) as first,
        workers.stand_in(served_model_name=["tiny"], token_delay=0.02) as second,
        workers.stand_in(served_model_name=["tiny"], token_delay=0.02) as third,
        workers.stand_in(served_model_name=["other"]) as fourth,
    ):
        yield first, second, third, fourth


@pytest.fixture(scope="module")
def proxy(fleet: tuple[RunningWorker, ...]) -> Iterator[RunningProxy]:
    with headrace(*fleet, settings=PROBES + ROUTING) as proxy:
        yield proxy


@pytest.fixture
def client(proxy: RunningProxy) -> Iterator[httpx.Client]:
    """Of a headrace that places calls as `ROUTING` says."""
    with client_of(proxy) as client:
        rules = [{"model": "other", "policies": ["consistent-hash"]}]
        client.put("/fleet/routing", json={"policies": ["least-loaded"], "rules": rules}).raise_for_status()
        yield client


def route(client: httpx.Client, **headers: str) -> tuple[str, str]:
    """The worker and the reason of a call."""
    sent = body(sampling={"max_tokens": 1}, model="tiny")
    response = client.post(PATH, json=sent, headers={name.replace("_", "-"): value for name, value in headers.items()})
    assert response.status_code == 200, response.text
    return response.headers["x-headrace-worker"], response.headers["x-headrace-route"]


def put(client: httpx.Client, *policies: str) -> None:
    response = client.put("/fleet/routing", json={"policies": policies})
    assert response.status_code == 200, response.text


def test_a_rule_is_for_its_model(client):
    _, reason = route(client)
    assert reason == "least-loaded: 0 tokens in flight"
    response = client.post(PATH, json=body(model="other"), headers={"x-session-id": "s"})
    assert response.headers["x-headrace-route"] == "consistent-hash: by x-session-id"


def test_a_worker_with_a_long_call_gets_no_other_one(proxy, client):
    with client.stream("POST", PATH, json=body(sampling={"max_tokens": 500}, model="tiny", stream=True)) as response:
        busy = response.headers["x-headrace-worker"]
        assert busy not in {route(client)[0] for _ in range(12)}
    wait_for(lambda: not proxy.in_flight())
    assert {route(client) for _ in range(3)}
    assert all(reason == "least-loaded: 0 tokens in flight" for _, reason in (route(client) for _ in range(3)))


def test_sessions_stay_until_they_are_finished_and_are_spread_by_their_number(client):
    put(client, "session", "round-robin")
    homes = {session: route(client, x_session_id=session)[0] for session in "abcdef"}
    assert sorted(Counter(homes.values()).values()) == [2, 2, 2]
    for session, home in homes.items():
        assert route(client, x_session_id=session) == (home, "session: its worker")
    for session in [session for session, home in homes.items() if home == homes["a"]]:
        assert client.post("/finish_session", params={"session_id": session}).status_code == 200
    assert route(client, x_session_id="new") == (homes["a"], "session: new; fewest here, 0")
    assert route(client)[1] == "round-robin"


def test_a_session_whose_worker_is_taken_out_moves_and_stays_where_it_is(client):
    put(client, "session", "round-robin")
    home, _ = route(client, x_session_id="moves")
    client.post(f"/fleet/workers/{home}/drain").raise_for_status()
    moved, reason = route(client, x_session_id="moves")
    client.post(f"/fleet/workers/{home}/release").raise_for_status()
    assert moved != home
    assert reason.startswith(f"session: {home} can't take it; fewest here, ")
    assert route(client, x_session_id="moves") == (moved, "session: its worker")


def test_a_hash_keeps_the_keys_of_the_workers_that_stay(client):
    put(client, "consistent-hash")
    keys = [str(number) for number in range(20)]
    before = {key: route(client, x_session_id=key)[0] for key in keys}
    client.post("/fleet/workers/w1/drain").raise_for_status()
    after = {key: route(client, x_session_id=key)[0] for key in keys}
    client.post("/fleet/workers/w1/release").raise_for_status()
    assert {key for key in keys if before[key] != after[key]} == {key for key in keys if before[key] == "w1"}
    assert {key: route(client, x_session_id=key)[0] for key in keys} == before


def test_random_takes_every_worker(client):
    put(client, "random")
    assert {route(client) for _ in range(40)} == {(f"w{number}", "random") for number in range(3)}


def test_what_is_in_force_is_shown_changed_and_journalled(client):
    shown = client.get("/fleet/routing").json()
    assert shown["policies"] == ["least-loaded"]
    assert shown["rules"] == [{"policies": ["consistent-hash"], "model": "other", "role": None}]
    assert shown["max_version_lag"] is None
    assert {"random", "round-robin", "session"} <= set(shown["available"])
    wanted = {"policies": ["session", "random"], "rules": [], "max_version_lag": 2}
    assert client.put("/fleet/routing", json=wanted).json() == {**shown, **wanted} == client.get("/fleet/routing").json()
    entries = [entry for entry in client.get("/fleet/journal").json()["entries"] if entry["what"] == "routing"]
    assert entries[-1]["detail"] == wanted


def test_what_is_shown_can_be_put_back(client):
    shown = client.get("/fleet/routing").json()
    put(client, "random")
    assert client.put("/fleet/routing", json=shown).json() == shown


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        ({"policies": ["randm"]}, "policies: no loaded plugin 'randm' chooses workers: did you mean 'random'?"),
        ({"policies": ["random"], "rules": [{"policies": ["x"]}]}, "rules[0].policies: no loaded plugin 'x' chooses workers: known are"),
        ({"policies": ["random"], "ruls": []}, "ruls: there is no such key here; did you mean 'rules'?"),
        ({"policies": ["random"], "retries": 1}, "retries: it can't be changed while calls run; it stands in the settings"),
        ({"polices": ["random"]}, "polices: there is no such key here; did you mean 'policies'?"),
        ({"policies": ["random", "session", "random"]}, "policies: 'random' is named twice"),
        (
            {"policies": ["random"], "rules": [{"policies": ["random"], "role": "chef"}]},
            "rules[0].role: 'chef' is none; there are 'aggregated', ",
        ),
        ({"policies": []}, "policies: Expected `array` of length >= 1"),
        ({}, "policies: this field is required"),
        ([], "Expected `object`, got `array`"),
    ],
)
def test_what_could_not_be_in_force_is_refused_and_changes_nothing(client, sent, message):
    before = client.get("/fleet/routing").json()
    response = client.put("/fleet/routing", json=sent)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(message)
    assert client.get("/fleet/routing").json() == before


def test_a_policy_that_comes_into_force_knows_what_is_in_flight(proxy, client):
    put(client, "round-robin")
    with client.stream("POST", PATH, json=body(sampling={"max_tokens": 500}, model="tiny", stream=True)) as response:
        busy = response.headers["x-headrace-worker"]
        put(client, "least-loaded")
        assert busy not in {route(client)[0] for _ in range(12)}


def test_an_unknown_rank_is_refused_with_those_that_there_are(client):
    response = client.post(PATH, json=body(model="tiny"), headers={"x-data-parallel-rank": "7"})
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "x-data-parallel-rank: there is no rank 7 on any worker; there are 0"


def test_an_explanation_shows_every_worker_and_policy_and_sends_nothing(client):
    put(client, "session", "least-loaded")
    client.post("/fleet/workers/w2/quarantine?reason=smoke").raise_for_status()
    told = client.post("/fleet/route", json=body(model="tiny")).json()
    client.post("/fleet/workers/w2/release").raise_for_status()
    assert {worker["id"]: worker["why"] for worker in told["workers"]} == {
        "w0": "",
        "w1": "",
        "w2": "is quarantined (smoke)",
        "w3": "serves other",
    }
    assert [(verdict["policy"], verdict["worker"] is None) for verdict in told["policies"]] == [("session", True), ("least-loaded", False)]
    assert told["choice"]["reason"] == "least-loaded: 0 tokens in flight"
    assert (told["waits"], told["error"]) == (False, None)


def test_a_call_that_would_be_refused_is_refused(client):
    response = client.post("/fleet/route", json={"token_ids": []})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "token_ids")


def run(proxy: RunningProxy, *arguments: str, sent: str | None = None) -> tuple[int, str]:
    result = CliRunner().invoke(
        main, ["route", "--url", proxy.url, *arguments], input=json.dumps(body(model="tiny")) if sent is None else sent
    )
    return result.exit_code, result.output


def test_the_command_says_where_a_call_would_go(proxy, client, tmp_path):
    put(client, "session", "round-robin")
    status, text = run(proxy)
    assert (status, text[:1], text[2:]) == (0, "w", " over grpc: round-robin\n")
    taken = text[:2]
    file = tmp_path / "body.json"
    file.write_text(json.dumps(body(model="tiny")))
    status, text = run(proxy, str(file), "--explain", "--header", "x-session-id: explained")
    lines = text.splitlines()
    assert status == 0
    assert lines[0].split() == ["worker", "state", "version", "eligible"]
    assert [line.split() for line in lines[1:4]] == [[f"w{number}", "ready", "default", "yes"] for number in range(3)]
    assert lines[4].endswith("no: it serves other")
    assert lines[6].split() == ["policy", "says"]
    assert lines[7].startswith("session      w")
    assert lines[8] == f"round-robin  {taken}, round-robin"
    assert " over grpc: session: new; fewest here, " in lines[10]
    assert json.loads(run(proxy, "--json")[1])["choice"]["policy"] == "round-robin"


def test_the_command_fails_when_there_is_nowhere_to_go(proxy, client):
    for name in ("w0", "w1", "w2"):
        client.post(f"/fleet/workers/{name}/drain").raise_for_status()
    status, text = run(proxy, "--explain")
    text = re.sub(r"\(by .*?\)", "(by somebody)", text)
    assert status == 1
    assert "w0      draining  default  no: it is draining (by somebody)" in text
    assert text.endswith(
        "nowhere: no worker is ready: w0 is draining (by somebody), w1 is draining (by somebody), w2 is draining (by somebody), "
        "w3 serves other\n"
    )
    for name in ("w0", "w1", "w2"):
        client.post(f"/fleet/workers/{name}/release").raise_for_status()
    client.post("/pause?mode=keep&clear_cache=false&model=tiny").raise_for_status()
    assert run(proxy) == (0, "it would wait at the gate\n")
    client.post("/resume?model=tiny").raise_for_status()


@pytest.mark.parametrize(
    ("arguments", "sent", "message"),
    [
        ((), "{", "this is not the body of a generate call"),
        ((), "[]", "this is not the body of a generate call"),
        ((), '{"token_ids": []}', "token_ids: Expected `array` of length >= 1"),
        (("--header", "x"), "{}", "--header: 'x' is not 'NAME: VALUE'"),
    ],
)
def test_the_command_refuses_what_is_no_call(proxy, arguments, sent, message):
    status, text = run(proxy, *arguments, sent=sent)
    assert status != 0
    assert message in text


def test_workers_that_are_behind_get_no_calls_until_they_have_caught_up(client):
    def label(worker: str, version: str) -> None:
        client.post(f"/workers/{worker}/update_weight_version", json={"new_version": version}).raise_for_status()

    for worker, version in (("w0", "9"), ("w1", "7"), ("w2", "8")):
        label(worker, version)
    client.put("/fleet/routing", json={"policies": ["random"], "max_version_lag": 1}).raise_for_status()
    assert {route(client)[0] for _ in range(30)} == {"w0", "w2"}
    told = client.post("/fleet/route", json=body(model="tiny")).json()
    assert {worker["id"]: worker["why"] for worker in told["workers"]}["w1"] == "is behind: it has version 7, and 9 is there"
    label("w1", "9")
    assert {route(client)[0] for _ in range(40)} == {"w0", "w1", "w2"}
    for worker in ("w0", "w1", "w2"):
        label(worker, "default")
