"""headrace's own administration over HTTP: updates, cohorts, pauses with a JSON body."""

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from core.northbound.cohorts import add_cohort_routes
from core.northbound.pausing import add_pausing_routes
from core.northbound.updates import add_update_routes
from core.routes import Routes
from core.wire.generated import vllm
from tests.unit.core.engines import AdministeredFleet, administered, broken
from tests.unit.core.test_routes import ask
from tests.unit.core.transports import Courier


def serve(fleet: AdministeredFleet) -> Routes:
    routes = Routes(max_body_bytes=10_000)
    add_update_routes(routes, fleet.administration)
    add_cohort_routes(routes, fleet.administration)
    add_pausing_routes(routes, fleet.administration)
    return routes


async def test_an_update_is_accepted_and_can_be_looked_at():
    async with administered(transports=[Courier()]) as fleet:
        routes = serve(fleet)
        browser = await ask(routes, "POST", "/fleet/updates", b'{"version":"7","transport":"courier","path":"/w"}')
        assert (browser.status, browser.json["status"]) == (202, "running")
        id_ = browser.json["id"]
        await fleet.administration.updates.get(id_).done.wait()
        one = (await ask(routes, "GET", f"/fleet/updates/{id_}")).json
        assert (one["status"], one["version"], one["workers"]["w1"]["status"]) == ("succeeded", "7", "done")
        assert (await ask(routes, "GET", "/fleet/updates")).json == {"updates": [one]}
        assert (await ask(routes, "GET", "/fleet/updates/x")).status == 404


async def test_who_waits_is_answered_with_the_end():
    async with administered(transports=[Courier()]) as fleet:
        routes = serve(fleet)
        body = b'{"version":"7","transport":"courier","mode":"abort","clear_cache":true,"wait":true}'
        browser = await ask(routes, "POST", "/fleet/updates", body)
        assert (browser.status, browser.json["status"]) == (200, "succeeded")
        assert fleet.engines[0].sent["pause"] == (vllm.PauseMode.ABORT, True)
        fleet.engines[0].fails["update"] = [broken("shapes differ")]
        browser = await ask(routes, "POST", "/fleet/updates", body)
        assert (browser.status, browser.json["error"]["message"]) == (
            500,
            "update failed on w0: shapes differ. Quarantined; the other workers go on",
        )


async def test_an_update_is_given_up():
    courier = Courier()
    async with administered(transports=[courier]) as fleet:
        routes = serve(fleet)
        courier.stalls["prepare"] = trio.Event()
        id_ = (await ask(routes, "POST", "/fleet/updates", b'{"version":"7","transport":"courier"}')).json["id"]
        await wait_all_tasks_blocked()
        assert (await ask(routes, "DELETE", f"/fleet/updates/{id_}")).status == 202
        await wait_all_tasks_blocked()
        shown = (await ask(routes, "GET", f"/fleet/updates/{id_}")).json
        assert (shown["status"], shown["error"]) == ("failed", "update: given up by 127.0.0.1")
        assert (await ask(routes, "DELETE", "/fleet/updates/x")).status == 404


async def test_an_update_that_is_over_is_not_given_up():
    async with administered(transports=[Courier()]) as fleet:
        routes = serve(fleet)
        id_ = (await ask(routes, "POST", "/fleet/updates", b'{"version":"7","transport":"courier","wait":true}')).json["id"]
        browser = await ask(routes, "DELETE", f"/fleet/updates/{id_}")
        assert (browser.status, browser.json["error"]["message"]) == (409, f"update {id_}: it is over, and has succeeded")


async def test_an_update_may_be_for_a_cohort():
    async with administered(1, 1, 1, transports=[Courier()]) as fleet:
        routes = serve(fleet)
        assert (await ask(routes, "POST", "/fleet/cohorts", b'{"name":"a","workers":["w2","w0"]}')).status == 200
        body = b'{"version":"7","transport":"courier","cohort":"a","wait":true}'
        assert list((await ask(routes, "POST", "/fleet/updates", body)).json["workers"]) == ["w2", "w0"]
        assert [engine.version for engine in fleet.engines] == ["7", "default", "7"]
        fleet.rig.move(fleet.workers[2], "gone")
        browser = await ask(routes, "POST", "/fleet/updates", body)
        assert (browser.status, "w2 is gone" in browser.json["error"]["message"]) == (409, True)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/fleet/updates", b"", None),
        ("/fleet/updates", b"[]", None),
        ("/fleet/updates", b'{"transport":"courier"}', "version"),
        ("/fleet/updates", b'{"version":7,"transport":"courier"}', "version"),
        ("/fleet/updates", b'{"version":" ","transport":"courier"}', "version"),
        ("/fleet/updates", b'{"version":"7","transport":"courier","mode":"stop"}', "mode"),
        ("/fleet/updates", b'{"version":"7","transport":"pigeon"}', "transport"),
        ("/fleet/updates", b'{"version":"7","transport":"courier","pathh":"/w"}', "pathh"),
        ("/fleet/updates", b'{"version":"7","transport":"courier","model":"tiny","cohort":"a"}', "cohort"),
        ("/fleet/cohorts", b'{"name":"a/b"}', "name"),
        ("/fleet/cohorts", b'{"name":"a","workers":[]}', "workers"),
        ("/fleet/pause", b'{"mode":"stop"}', "mode"),
        ("/fleet/resume", b'{"mode":"keep"}', "mode"),
    ],
)
async def test_what_is_wrong_is_refused_before_a_worker_hears_of_it(path, body, param):
    async with administered(transports=[Courier()]) as fleet:
        browser = await ask(serve(fleet), "POST", path, body)
        assert (browser.status, browser.json["error"]["param"]) == (400, param)
        assert [engine.asked for engine in fleet.engines] == [[], []]


@pytest.mark.parametrize("version", ["7\\n8", "\\u001b[2J7", "7\\u007f", "7\\u0085", "\\u2028"])
async def test_a_version_that_would_break_the_lines_of_a_log_is_refused(version):
    async with administered(transports=[Courier()]) as fleet:
        body = f'{{"version":"{version}x","transport":"courier"}}'.encode()
        browser = await ask(serve(fleet), "POST", "/fleet/updates", body)
        assert (browser.status, browser.json["error"]["param"]) == (400, "version")
        assert browser.json["error"]["message"] == "version: it must not have control characters"
        assert fleet.administration.updates.describe_all() == []


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/fleet/pause"),
        ("POST", "/fleet/resume"),
        ("POST", "/fleet/updates"),
        ("GET", "/fleet/updates"),
        ("GET", "/fleet/updates/x"),
        ("DELETE", "/fleet/updates/x"),
        ("POST", "/fleet/cohorts"),
        ("GET", "/fleet/cohorts"),
        ("DELETE", "/fleet/cohorts/x"),
    ],
)
async def test_whom_a_query_names_is_not_dropped_without_a_word(method, path):
    async with administered(transports=[Courier()]) as fleet:
        browser = await ask(serve(fleet), method, path, b'{"version":"7","transport":"courier"}', "cohort=left")
        assert (browser.status, browser.json["error"]["param"]) == (400, "cohort")
        assert browser.json["error"]["message"] == f"cohort: there is no such key here; {path} takes no query"
        assert [engine.asked for engine in fleet.engines] == [[], []]


async def test_cohorts_are_named_shown_and_forgotten():
    async with administered(1, 3) as fleet:
        routes = serve(fleet)
        browser = await ask(routes, "POST", "/fleet/cohorts", b'{"name":"a","model":"tiny","workers":["w1"],"substitution":true}')
        cohort = {"name": "a", "model": "tiny", "workers": ["w1"], "ranks": 3, "substitution": True, "changes": []}
        assert (browser.status, browser.json) == (200, cohort)
        assert (await ask(routes, "GET", "/fleet/cohorts")).json == {"cohorts": [cohort]}
        assert (await ask(routes, "DELETE", "/fleet/cohorts/a")).status == 200
        assert (await ask(routes, "GET", "/fleet/cohorts")).json == {"cohorts": []}
        assert (await ask(routes, "DELETE", "/fleet/cohorts/a")).status == 404


async def test_the_fleet_is_paused_and_resumed_and_shown():
    async with administered(1, 1, models=["x", "y"]) as fleet:
        routes = serve(fleet)
        assert (await ask(routes, "POST", "/fleet/pause")).status == 400  # which model?
        browser = await ask(routes, "POST", "/fleet/pause", b'{"model":"y","mode":"wait","clear_cache":true}')
        assert browser.json == {"workers": [{"id": "w1", "state": "paused", "reason": "by a trainer"}]}
        assert fleet.engines[1].sent["pause"] == (vllm.PauseMode.WAIT, True)
        fleet.administration.select_cohort("a", "", ["w1"], substitution=False, by="me")
        browser = await ask(routes, "POST", "/fleet/resume", b'{"cohort":"a"}')
        assert browser.json == {"workers": [{"id": "w1", "state": "ready", "reason": ""}]}
