"""Workers joining, leaving, being paused, as probes find them; on the virtual clock."""

from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from core.errors import WorkerLost
from core.fleet import fleet as fleet_module
from core.fleet.connection import Connection
from core.fleet.fleet import Fleet
from core.fleet.probe import HttpProbe, ProbeFailed, Report
from core.fleet.worker import Worker, WorkerInfo
from core.hookspecs import hookimpl
from core.registry import Loaded, Registry
from core.settings import GateSettings, ProbeSettings, WorkerSettings
from core.wire import open_channel
from core.wire.needs import PYTHON_HTTP_CAN, RUST_HTTP_CAN
from tests.unit.core.lanes import ScriptedLane

SETTINGS = WorkerSettings(grpc="127.0.0.1:50051", id="w")
RUNNING = Report(paused=False, policy_version="7")
PAUSED = Report(paused=True, policy_version="7")


class Answers:
    """A connection whose probe answers what it is told to: a `Report`, an exception, or nothing at all for an event."""

    def __init__(self, answer: Any):
        self.answer = answer
        self.introductions = 0
        self.checks = 0
        self.probe = self
        self.closed = False
        self.http_closed = ""
        self.control = self.http = None
        self.settle = trio.lowlevel.checkpoint

    async def introduce(self):
        self.introductions += 1
        return WorkerInfo(models=("tiny",), model_id="tiny", max_model_len=100)

    async def check(self):
        self.checks += 1
        await trio.lowlevel.checkpoint()
        if isinstance(self.answer, trio.Event):
            await self.answer.wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def lanes(self, max_model_len):
        return (ScriptedLane(),), self.http_closed


class Served:
    """A fleet that serves one worker, and what it told of it."""

    def __init__(self, monkeypatch, answer, **probe):
        self.connection = Answers(answer)
        self.told = []
        self.fleet = Fleet(ProbeSettings(**probe), GateSettings(), Registry([Loaded("told", self)]))

        @asynccontextmanager
        async def connect(settings):
            try:
                yield self.connection
            finally:
                self.connection.closed = True

        monkeypatch.setattr(fleet_module, "connect", connect)

    @hookimpl
    def worker_joined(self, worker: Worker) -> None:
        self.told.append(("joined", worker.id, len(self.fleet.ready)))

    @hookimpl
    def worker_left(self, worker: Worker) -> None:
        self.told.append(("left", worker.id, len(self.fleet.ready)))

    @property
    def worker(self):
        return self.fleet.workers["w"]

    @asynccontextmanager
    async def running(self):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.fleet.serve, SETTINGS)
            await wait_all_tasks_blocked()
            yield self
            nursery.cancel_scope.cancel()


async def test_a_healthy_worker_joins_and_takes_calls(monkeypatch, autojump_clock):
    async with Served(monkeypatch, RUNNING).running() as served:
        assert served.worker.state == "ready"
        assert served.worker.policy_version == "7"
        assert served.fleet.ready == (served.worker,)
        assert served.told == [("joined", "w", 0)]


async def test_a_worker_that_is_taken_out_leaves_and_its_connections_are_closed(monkeypatch, autojump_clock):
    served = Served(monkeypatch, RUNNING)
    async with served.running():
        pass
    assert served.told == [("joined", "w", 0), ("left", "w", 0)]
    assert served.connection.closed
    assert served.fleet.workers == {}
    assert served.fleet.ready == ()


async def test_a_paused_worker_is_there_but_takes_no_calls(monkeypatch, autojump_clock):
    async with Served(monkeypatch, PAUSED, interval=2.0).running() as served:
        assert (served.worker.state, served.fleet.ready) == ("paused", ())
        served.connection.answer = RUNNING
        await trio.sleep(2.5)
        assert served.worker.state == "ready"
    assert [told[0] for told in served.told] == ["joined", "left"]


async def test_one_failed_probe_is_nothing_and_several_in_a_row_are_the_end(monkeypatch, autojump_clock):
    async with Served(monkeypatch, RUNNING, interval=2.0, failures=3).running() as served:
        served.connection.answer = ProbeFailed("busy", certain=False)
        await trio.sleep(5)
        assert served.worker.state == "ready"
        await trio.sleep(2)
        assert (served.worker.state, served.worker.reason) == ("gone", "busy")
        assert served.told[-1] == ("left", "w", 0)


async def test_a_good_probe_between_bad_ones_starts_the_count_again(monkeypatch, autojump_clock):
    async with Served(monkeypatch, RUNNING, interval=2.0, failures=2).running() as served:
        for answer in (ProbeFailed("busy", certain=False), RUNNING) * 3:
            served.connection.answer = answer
            await trio.sleep(2)
        assert served.worker.state == "ready"
        assert served.told == [("joined", "w", 0)]


@pytest.mark.parametrize(("certain", "lost"), [(True, True), (False, False)])
async def test_calls_are_lost_when_a_worker_is_dead_for_certain_and_not_when_it_may_be_busy(monkeypatch, autojump_clock, certain, lost):
    async with Served(monkeypatch, RUNNING, interval=2.0).running() as served:
        with served.worker.serving() if not lost else pytest.raises(WorkerLost, match="engine is dead"), served.worker.serving():
            served.connection.answer = ProbeFailed("its engine is dead", certain=certain)
            await trio.sleep(20)


async def test_calls_survive_a_single_failed_probe_however_few_are_the_end(monkeypatch, autojump_clock):
    async with Served(monkeypatch, RUNNING, interval=2.0, failures=1).running() as served:
        with served.worker.serving():
            served.connection.answer = ProbeFailed("busy", certain=False)
            await trio.sleep(2.5)
            assert served.worker.state == "gone"
            served.connection.answer = RUNNING
            await trio.sleep(2)
            assert served.worker.state == "ready"


async def test_calls_stay_on_a_worker_that_is_busy_with_an_update(monkeypatch, autojump_clock):
    async with Served(monkeypatch, RUNNING, interval=2.0, failures=2).running() as served:
        with served.worker.administered(), served.worker.serving():
            served.connection.answer = ProbeFailed("no answer", certain=False)
            await trio.sleep(20)


async def test_a_worker_that_is_busy_with_an_update_may_leave_probes_unanswered_but_not_say_that_it_is_dead(monkeypatch, autojump_clock):
    async with Served(monkeypatch, RUNNING, interval=2.0, failures=2).running() as served:
        with served.worker.administered():
            served.connection.answer = ProbeFailed("no answer", certain=False)
            await trio.sleep(20)
            assert served.worker.state == "ready"
            served.connection.answer = ProbeFailed("its engine is dead", certain=True)
            await trio.sleep(2.5)
            assert served.worker.state == "gone"


async def test_a_certain_failure_is_the_end_at_once(monkeypatch, autojump_clock):
    async with Served(monkeypatch, RUNNING, interval=2.0).running() as served:
        served.connection.answer = ProbeFailed("it says so itself", certain=True)
        await trio.sleep(2.5)
        assert served.worker.state == "gone"


async def test_a_suspected_worker_is_probed_at_once(monkeypatch, autojump_clock):
    async with Served(monkeypatch, RUNNING, interval=1000.0).running() as served:
        checks = served.connection.checks
        served.connection.answer = ProbeFailed("refused", certain=True)
        served.worker.suspect()
        await wait_all_tasks_blocked()
        assert served.connection.checks == checks + 1
        assert served.worker.state == "gone"


async def test_a_worker_that_comes_back_is_introduced_again_and_joins_again(monkeypatch, autojump_clock):
    async with Served(monkeypatch, RUNNING, interval=2.0).running() as served:
        served.connection.answer = ProbeFailed("refused", certain=True)
        await trio.sleep(2.5)
        served.connection.answer = RUNNING
        await trio.sleep(2.5)
        assert served.worker.state == "ready"
        assert served.connection.introductions == 2
        assert [told[0] for told in served.told] == ["joined", "left", "joined"]


async def test_a_probe_that_is_not_answered_fails_after_its_time(monkeypatch, autojump_clock):
    async with Served(monkeypatch, trio.Event(), timeout=10.0).running() as served:
        await trio.sleep(11)
        assert (served.worker.state, served.worker.reason) == ("starting", "no answer to a probe within 10 s")
        assert served.told == []


async def test_why_a_worker_does_not_start_is_logged_once_for_each_reason(monkeypatch, autojump_clock):
    lines = []
    monkeypatch.setattr(fleet_module, "log", type("Log", (), {"info": lambda _, event, **fields: lines.append(fields["reason"])})())
    async with Served(monkeypatch, ProbeFailed("refused", certain=True), interval=2.0).running() as served:
        await trio.sleep(9)
        served.connection.answer = ProbeFailed("another", certain=True)
        await trio.sleep(9)
    assert lines == ["refused", "another", "taken out of the fleet"]


async def test_two_workers_of_one_name_are_refused(monkeypatch, autojump_clock):
    async with Served(monkeypatch, RUNNING).running() as served:
        with pytest.raises(ValueError, match="worker 'w' is in the fleet already"):
            await served.fleet.serve(SETTINGS)
        assert served.worker.state == "ready"


async def test_a_worker_that_joins_opens_the_gate(monkeypatch, autojump_clock):
    async with Served(monkeypatch, PAUSED, interval=2.0).running() as served, trio.open_nursery() as nursery:
        nursery.start_soon(served.fleet.gate.wait_while, lambda: not served.fleet.ready)
        await wait_all_tasks_blocked()
        assert served.fleet.gate.waiting == 1
        served.connection.answer = RUNNING
        await trio.sleep(2.5)
        assert served.fleet.gate.waiting == 0


async def test_a_worker_whose_http_server_is_not_there_yet_does_not_join_without_it():
    client = httpx.AsyncClient(base_url="http://w", transport=httpx.MockTransport(lambda _: raises(httpx.ConnectError("refused"))))
    async with open_channel("127.0.0.1", 1) as channel:
        with pytest.raises(ProbeFailed, match="refused"):
            await Connection(channel, channel, client).lanes(100)


CLOSED = {
    401: "http://w wants an API key (401): let api_key_env name the variable that holds it",
    404: "its HTTP server doesn't offer /inference/v1/generate: start it with --enable-scale-out",
    403: "its HTTP server doesn't offer /inference/v1/generate: start it with --enable-scale-out",
    500: "its HTTP server answers 500 to /inference/v1/generate",
}


@pytest.mark.parametrize("status", CLOSED)
async def test_a_worker_whose_http_server_takes_no_calls_says_why(status):
    client = httpx.AsyncClient(base_url="http://w", transport=httpx.MockTransport(lambda _: httpx.Response(status)))
    async with open_channel("127.0.0.1", 1) as channel:
        lanes, closed = await Connection(channel, channel, client).lanes(100)
        assert ([lane.wire for lane in lanes], closed) == (["grpc"], CLOSED[status])
    with pytest.raises(ProbeFailed) as raised:
        await Connection(None, None, client).lanes(100)
    assert (str(raised.value), raised.value.certain) == (CLOSED[status], True)


async def test_a_wrong_key_is_told_from_none():
    client = httpx.AsyncClient(
        base_url="http://w", headers={"authorization": "Bearer k"}, transport=httpx.MockTransport(lambda _: httpx.Response(401))
    )
    with pytest.raises(ProbeFailed, match=r"http://w refuses the API key \(401\): the variable that api_key_env names holds another one"):
        await HttpProbe(client).introduce()


async def test_that_an_http_server_takes_no_calls_is_shown_and_logged_once(monkeypatch, autojump_clock):
    warned = []
    log = type("Log", (), {"info": lambda *_, **__: None, "warning": lambda _, event, **fields: warned.append((event, fields))})
    monkeypatch.setattr(fleet_module, "log", log())
    served = Served(monkeypatch, RUNNING, interval=2.0)
    served.connection.http_closed = CLOSED[404]
    async with served.running():
        for answer in (RUNNING, ProbeFailed("refused", certain=True), RUNNING):
            served.connection.answer = answer
            await trio.sleep(2.5)
        assert served.worker.state == "ready"
        assert served.worker.describe()["capabilities"]["closed"] == {"http": CLOSED[404]}
    assert served.connection.introductions == 2
    assert warned == [("worker.http_closed", {"worker": "w", "reason": CLOSED[404]})]


def raises(error):
    raise error


async def test_a_held_worker_stays_as_it_is_held_whatever_its_probes_say(monkeypatch, autojump_clock):
    async with Served(monkeypatch, RUNNING, interval=2.0).running() as served:
        served.fleet.hold(served.worker, "quarantined", "it failed an update")
        assert (served.worker.state, served.worker.reason, served.fleet.ready) == ("quarantined", "it failed an update", ())
        for answer in (PAUSED, RUNNING):
            served.connection.answer = answer
            await trio.sleep(5)
            assert served.worker.state == "quarantined"
        served.fleet.release(served.worker)
        assert (served.worker.state, served.worker.reason, served.fleet.ready) == ("ready", "", (served.worker,))


async def test_a_held_worker_that_is_gone_is_gone_and_held_again_when_it_comes_back(monkeypatch, autojump_clock):
    async with Served(monkeypatch, RUNNING, interval=2.0).running() as served:
        served.fleet.hold(served.worker, "quarantined", "it failed an update")
        served.connection.answer = ProbeFailed("refused", certain=True)
        await trio.sleep(2.5)
        assert (served.worker.state, served.worker.reason) == ("gone", "refused")
        served.connection.answer = RUNNING
        await trio.sleep(2.5)
        assert (served.worker.state, served.fleet.ready) == ("quarantined", ())
    assert [told[0] for told in served.told] == ["joined", "left", "joined", "left"]


async def test_a_worker_that_was_resumed_takes_calls_at_once(monkeypatch, autojump_clock):
    async with Served(monkeypatch, PAUSED, interval=1000.0).running() as served:
        served.fleet.hold(served.worker, "paused", "by a trainer")
        served.fleet.resumed(served.worker)
        assert served.fleet.ready == ()
        served.fleet.release(served.worker)
        assert served.fleet.ready == (served.worker,)


async def test_an_answer_from_before_a_change_is_not_believed(monkeypatch, autojump_clock):
    async with Served(monkeypatch, RUNNING, interval=2.0).running() as served:
        answered = trio.Event()

        async def check():  # the worker was still paused when it answered
            await answered.wait()
            served.connection.check = lambda: Answers.check(served.connection)
            return PAUSED

        served.connection.check = check
        await trio.sleep(2.5)
        served.fleet.hold(served.worker, "paused", "by a trainer")
        served.fleet.release(served.worker)
        answered.set()
        await wait_all_tasks_blocked()
        assert served.worker.state == "ready"


async def test_who_greets_a_worker_may_hold_it_before_its_first_call(monkeypatch, autojump_clock):
    served = Served(monkeypatch, RUNNING)
    served.fleet.greet = lambda worker: served.fleet.hold(worker, "paused", "the others are")
    async with served.running():
        assert (served.worker.state, served.fleet.ready) == ("paused", ())


async def test_workers_stand_in_the_order_of_the_settings(monkeypatch, autojump_clock):
    served = Served(monkeypatch, RUNNING)
    names = [str(number) for number in range(20)]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(served.fleet.run, [WorkerSettings(grpc="127.0.0.1:1", id=name) for name in names])
        await wait_all_tasks_blocked()
        assert list(served.fleet.workers) == [worker.id for worker in served.fleet.ready] == names
        nursery.cancel_scope.cancel()


# --- the HTTP probe ----------------------------------------------------------------------------------------------------------

MODELS = {
    "data": [{"id": "tiny", "root": "/m", "parent": None, "max_model_len": 2048}, {"id": "a", "parent": "tiny", "max_model_len": None}]
}


def probe(routes):
    def handler(request):
        answer = routes.get(request.url.path, httpx.Response(404))
        if isinstance(answer, Exception):
            raises(answer)
        return answer if isinstance(answer, httpx.Response) else httpx.Response(200, json=answer)

    return HttpProbe(httpx.AsyncClient(base_url="http://w", transport=httpx.MockTransport(handler)))


async def test_an_http_worker_introduces_itself_without_its_adapters():
    info = await probe({"/v1/models": MODELS, "/version": {"version": "0.33.0"}, "/get_world_size": {"world_size": 4}}).introduce()
    assert (info.models, info.model_id, info.max_model_len) == (("tiny",), "/m", 2048)
    assert (info.engine_version, info.world_size) == ("0.33.0", 4)


@pytest.mark.parametrize(
    ("sources", "ranks", "world_size"),
    [
        ({"0": {"endpoint": "tcp://*:5557"}, "1": {"endpoint": "tcp://*:5558"}}, (0, 1), 2),
        ({"0": {"endpoint": "tcp://*:5557"}}, (0,), 4),
        ({"2": {}, "3": {}}, (0,), 4),  # a part of a group, of which an HTTP server doesn't say how large it is
        ({}, (0,), 4),
    ],
)
async def test_an_http_worker_whose_engines_publish_events_tells_its_ranks_by_them(sources, ranks, world_size):
    routes = {"/v1/models": MODELS, "/version": {"version": "1"}, "/get_world_size": {"world_size": 4}, "/kv_event_sources": sources}
    info = await probe(routes).introduce()
    assert (info.ranks, info.world_size) == (ranks, world_size)


async def test_a_server_without_development_routes_counts_as_one_running_rank():
    worker = probe({"/v1/models": MODELS, "/version": {"version": "0.33.0"}, "/health": httpx.Response(200)})
    assert (await worker.introduce()).world_size == 1
    assert await worker.check() == Report(paused=False, policy_version=None)


async def test_a_paused_http_worker_says_so():
    answers = {"/health": httpx.Response(200), "/is_paused": {"is_paused": True}, "/weight_info": {"weight_version": "7"}}
    assert await probe(answers).check() == Report(paused=True, policy_version="7")


@pytest.mark.parametrize(
    "routes",
    [
        {},
        {"/v1/models": {"data": 3}},
        {"/v1/models": {"data": [3]}},
        {"/v1/models": {"data": [{"id": 3}]}},
        {"/v1/models": {"data": []}},
        {"/v1/models": httpx.Response(200, text="<html>")},
        {"/v1/models": httpx.Response(200, content=b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}")},
        {"/v1/models": [1]},
        {"/v1/models": MODELS, "/version": {"version": 3}},
        {"/v1/models": MODELS, "/version": {"version": "1"}, "/get_world_size": {"world_size": None}},
        {"/v1/models": httpx.ReadTimeout("slow")},
    ],
)
async def test_a_server_that_is_no_worker_fails_its_probe_and_nothing_else(routes):
    with pytest.raises(ProbeFailed):
        await probe(routes).introduce()


async def test_nobody_at_the_address_is_certain_and_a_slow_answer_is_not():
    for error, certain in ((httpx.ConnectError("refused"), True), (httpx.ReadError("reset"), False)):
        with pytest.raises(ProbeFailed) as raised:
            await probe({"/health": error}).check()
        assert raised.value.certain is certain


@pytest.mark.parametrize(("status", "certain"), [(503, True), (500, False)])
async def test_an_unhealthy_answer_fails(status, certain):
    with pytest.raises(ProbeFailed) as raised:
        await probe({"/health": httpx.Response(status)}).check()
    assert raised.value.certain is certain


@pytest.mark.parametrize(
    ("answer", "version", "can"),
    [
        (httpx.Response(400), {"version": "0.33.0", "rust_frontend_version": "0.33.0"}, RUST_HTTP_CAN),
        (httpx.Response(422), {"version": "0.33.0"}, PYTHON_HTTP_CAN),
    ],
)
async def test_what_the_generate_route_can(answer, version, can):
    assert await probe({"/inference/v1/generate": answer, "/version": version}).generate_can() == can
