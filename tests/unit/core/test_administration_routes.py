"""The administration over HTTP: vLLM's parameters and replies, for all workers or for one."""

from contextlib import suppress

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from core.errors import CallAborted
from core.northbound.administration import add_administration_routes
from core.registry import Loaded, Registry
from core.routes import Routes
from tests.unit.core.engines import INIT, UPDATE, administered, serve_http
from tests.unit.core.rig import make_call
from tests.unit.core.test_routes import ask

ROUTES = [
    ("POST", "/pause", b"", {"status": "paused"}),
    ("GET", "/is_paused", b"", {"is_paused": True}),
    ("GET", "/is_sleeping", b"", {"is_sleeping": False}),
    ("POST", "/start_weight_update", b"", {"message": "Weight update started"}),
    ("POST", "/update_weights", b'{"update_info":{"names":["w"]}}', {"message": "Weights updated"}),
    ("POST", "/finish_weight_update", b"", {"message": "Weight update finished"}),
    ("POST", "/start_draft_weight_update", b"", {"message": "Draft weight update started"}),
    ("POST", "/update_weights", b'{"update_info":{"names":["w"]}}', {"message": "Weights updated"}),
    ("POST", "/finish_weight_update", b"", {"message": "Weight update finished"}),
    ("POST", "/update_weight_version", b'{"new_version":"9"}', {"success": True, "new_version": "9"}),
    ("GET", "/weight_info", b"", {"weight_version": "9"}),
    ("POST", "/resume", b"", {"status": "resumed"}),
    ("POST", "/sleep", b"", {"status": "sleeping", "level": 1}),
    ("POST", "/wake_up", b"", {"status": "awake", "tags": None}),
]


def serve(fleet, *plugins):
    routes = Routes(max_body_bytes=10_000)
    registry = Registry([Loaded(f"p{i}", plugin) for i, plugin in enumerate(plugins)])
    add_administration_routes(routes, fleet.administration, registry)
    return routes


@pytest.mark.parametrize("prefix", ["", "/workers/w0"])
async def test_the_routes_answer_as_one_server_does(prefix):
    async with administered() as fleet:
        routes = serve(fleet)
        for method, path, body, reply in ROUTES:
            browser = await ask(routes, method, prefix + path, body)
            assert (browser.status, browser.json) == (200, reply), path
        assert fleet.states == ["ready", "ready"]
        assert len(set(map(str, (engine.asked for engine in fleet.engines)))) == (2 if prefix else 1)
        browser = await ask(routes, "POST", prefix + "/abort_requests", b'{"request_ids":["r1"]}')
        assert (browser.status, browser.raw, fleet.engines[0].sent["abort"]) == (200, b"", ["r1"])


async def test_an_abort_ends_what_waits_at_the_gate_and_every_output_on_the_workers():
    async with administered() as fleet:
        routes, aborts = serve(fleet), fleet.administration.aborts

        async def wait() -> None:
            with pytest.raises(CallAborted), aborts.waiting(make_call(id="waits")):
                await trio.sleep_forever()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await wait_all_tasks_blocked()
            with aborts.several(make_call(id="many"), 2):
                await ask(routes, "POST", "/workers/w0/abort_requests", b'{"request_ids":["waits"]}')
                assert nursery.child_tasks
                await ask(routes, "POST", "/abort_requests", b'{"request_ids":["waits","many"]}')
        assert [engine.sent["abort"] for engine in fleet.engines] == [["waits", "many", "many-0", "many-1"]] * 2


@pytest.mark.parametrize("body", [b"{}", b'{"request_ids":[]}'])
@pytest.mark.parametrize(("query", "ended"), [("", {"x", "y", "adapter"}), ("model=y", {"y"})])
async def test_an_abort_without_ids_ends_all_calls(body, query, ended):
    models = ["x", "y"] if query else None
    async with administered(models=models) as fleet, trio.open_nursery() as nursery:
        routes, aborts, over = serve(fleet), fleet.administration.aborts, set()
        sent = [serve_http(worker, {}) for worker in fleet.workers]

        async def wait(model: str) -> None:
            with suppress(CallAborted), aborts.waiting(make_call(id="waits", model=model)):
                await trio.sleep_forever()
            over.add(model)

        for model in ("x", "y", "adapter"):
            nursery.start_soon(wait, model)
        await wait_all_tasks_blocked()
        assert (await ask(routes, "POST", "/workers/w1/abort_requests", body)).status == 200
        assert (over, sent) == (set(), [[], [{"request_ids": []}]])
        assert (await ask(routes, "POST", "/abort_requests", body, query)).status == 200
        await wait_all_tasks_blocked()
        assert (over, [len(bodies) for bodies in sent]) == (ended, [not query, 2])
        nursery.cancel_scope.cancel()


async def test_an_abort_of_all_calls_needs_the_workers_http_server():
    async with administered() as fleet:
        refused = await ask(serve(fleet), "POST", "/abort_requests", b"{}")
        assert (refused.status, "only its HTTP server has this" in refused.json["error"]["message"]) == (501, True)


@pytest.mark.parametrize(
    ("path", "query", "body", "param"),
    [
        ("/pause", "mode=stop", b"", "mode"),
        ("/pause", "mode=keep&bogus=1", b"", "bogus"),
        ("/cohorts/left/resume", "mode=keep", b"", "mode"),
        ("/pause", "mode=keep&mode=bogus", b"", "mode"),
        ("/wake_up", "tags=weights&model=tiny&model=tiny", b"", "model"),
        ("/pause", "", b'{"mode":"keep"}', None),
        ("/resume", "", b"{", None),
        ("/collective_rpc", "timeout=1", b'{"method":"m"}', "timeout"),
        ("/pause", "clear_cache=1", b"", "clear_cache"),
        ("/sleep", "level=3", b"", "level"),
        ("/wake_up", "tags=weights&tags=foo", b"", "tags"),
        ("/wake_up", "tags=", b"", "tags"),
        ("/reset_prefix_cache", "reset_external=yes", b"", "reset_external"),
        ("/init_weight_transfer_engine", "", b'{"init_info":[]}', "init_info"),
        ("/init_weight_transfer_engine", "", b'{"init_info":{"rank_offset":-1,"world_size":1}}', "init_info.rank_offset"),
        ("/init_weight_transfer_engine", "", b'{"init_info":{"rank_offset":1,"world_size":2}}', "init_info.world_size"),
        ("/update_weights", "", b'{"update_info":1}', "update_info"),
        ("/update_weights", "", b'{"weights":{}}', "weights"),
        ("/update_weights", "", b"{", None),
        ("/finish_weight_update", "", b'{"weight_version":" "}', "weight_version"),
        ("/update_weight_version", "", b'{"new_version":""}', "new_version"),
        ("/finish_weight_update", "", b'{"weight_version":"7\\n"}', "weight_version"),
        ("/update_weight_version", "", b'{"new_version":"\\u001b[2J"}', "new_version"),
        ("/collective_rpc", "", b'{"args":[]}', "method"),
        ("/abort_requests", "", b'{"request_ids":["a"],"ids":[]}', "ids"),
    ],
)
async def test_what_is_wrong_is_refused_by_name_before_a_worker_hears_of_it(path, query, body, param):
    async with administered() as fleet:
        browser = await ask(serve(fleet), "POST", path, body, query)
        assert (browser.status, browser.json["error"]["param"]) == (400, param)
        assert [engine.asked for engine in fleet.engines] == [[], []]


async def test_a_refused_tag_is_told_with_those_that_there_are():
    async with administered() as fleet:
        refused = await ask(serve(fleet), "POST", "/wake_up", query="tags=weights,kv_cache")
        assert refused.json["error"]["message"] == "tags: 'weights,kv_cache' is none; there are weights, kv_cache, scheduling"


async def test_an_empty_object_is_as_good_as_no_body():
    async with administered() as fleet:
        assert (await ask(serve(fleet), "POST", "/pause", b" {} ", "mode=keep")).status == 200
        refused = await ask(serve(fleet), "POST", "/pause", query="mod=keep")
        assert refused.json["error"]["message"] == (
            "mod: there is no such key here; known in the query of /pause are clear_cache, mode, model"
        )


async def test_the_fleet_is_numbered_behind_the_trainers_own_ranks():
    async with administered(1, 3) as fleet:
        routes = serve(fleet)
        assert (await ask(routes, "GET", "/get_world_size")).json == {"world_size": 4}
        body = b'{"init_info":{"master_address":"h","master_port":1,"rank_offset":1,"world_size":5}}'
        browser = await ask(routes, "POST", "/init_weight_transfer_engine", body)
        assert browser.json == {"message": "Weight transfer initialized"}
        sent = [engine.sent["init"] for engine in fleet.engines]
        assert sent == [{**INIT, "rank_offset": 1, "world_size": 5}, {**INIT, "rank_offset": 2, "world_size": 5}]


async def test_a_named_cohort_is_spoken_to_as_one_server_numbered_in_its_own_order():
    async with administered(1, 3, 2) as fleet:
        routes = serve(fleet)
        fleet.administration.select_cohort("a", "", ["w2", "w1"], substitution=False, by="me")
        assert (await ask(routes, "GET", "/cohorts/a/get_world_size")).json == {"world_size": 5}
        body = b'{"init_info":{"rank_offset":1,"world_size":6}}'
        assert (await ask(routes, "POST", "/cohorts/a/init_weight_transfer_engine", body)).status == 200
        assert [engine.sent.get("init", {}).get("rank_offset") for engine in fleet.engines] == [None, 3, 1]
        for method, path, body, reply in ROUTES:
            browser = await ask(routes, method, f"/cohorts/a{path}", body)
            assert (browser.status, browser.json) == (200, reply), path
        assert fleet.engines[0].asked == []
        assert (await ask(routes, "GET", "/cohorts/b/is_paused")).status == 404


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/start_weight_update", b""),
        ("/start_draft_weight_update", b""),
        ("/init_weight_transfer_engine", b'{"init_info":{}}'),
        ("/collective_rpc", b'{"method":"reload_weights"}'),
    ],
)
async def test_an_update_of_a_cohort_that_has_lost_a_member_is_a_409_that_names_it(path, body):
    async with administered() as fleet:
        routes = serve(fleet)
        fleet.administration.select_cohort("a", "", ["w0", "w1"], substitution=False, by="me")
        fleet.rig.move(fleet.workers[1], "gone")
        browser = await ask(routes, "POST", f"/cohorts/a{path}", body)
        assert (browser.status, "w1 is gone" in browser.json["error"]["message"]) == (409, True)
        assert (await ask(routes, "POST", "/cohorts/a/pause")).status == 200


async def test_who_speaks_to_a_worker_alone_numbers_it_and_transports_without_ranks_are_not_numbered():
    async with administered(1, 3) as fleet:
        routes = serve(fleet)
        await ask(routes, "POST", "/workers/w1/init_weight_transfer_engine", b'{"init_info":{"rank_offset":7,"world_size":9}}')
        assert fleet.engines[1].sent["init"] == {"rank_offset": 7, "world_size": 9}
        await ask(routes, "POST", "/init_weight_transfer_engine", b'{"init_info":{"server_url":"u"}}')
        assert [engine.sent["init"] for engine in fleet.engines] == [{"server_url": "u"}] * 2


async def test_some_is_not_all():
    async with administered() as fleet:
        routes = serve(fleet)
        assert (await ask(routes, "POST", "/workers/w0/pause")).status == 200
        assert (await ask(routes, "GET", "/is_paused")).json == {"is_paused": False}
        await ask(routes, "POST", "/workers/w0/update_weight_version", b'{"new_version":"9"}')
        browser = await ask(routes, "GET", "/weight_info")
        assert browser.status == 409
        assert browser.json["error"]["message"] == "weight_info: the workers' versions differ: w0 has '9', w1 has 'default'"


async def test_a_fleet_is_paused_whoever_is_quarantined_or_waits_for_the_others():
    async with administered(1, 1, 1) as fleet:
        routes = serve(fleet)
        fleet.administration.quarantine(fleet.workers[1], "it smells", by="me")
        assert (await ask(routes, "POST", "/pause", query="mode=keep")).status == 200
        assert (await ask(routes, "GET", "/is_paused")).json == {"is_paused": True}
        assert (await ask(routes, "GET", "/workers/w1/is_paused")).json == {"is_paused": False}
        await fleet.administration.release(fleet.workers[1], by="me")
        assert fleet.workers[1].reason == "it waits for the others, which are paused"
        assert (await ask(routes, "GET", "/is_paused")).json == {"is_paused": True}
        await ask(routes, "POST", "/resume")
        assert (await ask(routes, "GET", "/is_paused")).json == {"is_paused": False}


async def test_tags_may_be_repeated():
    async with administered() as fleet:
        browser = await ask(serve(fleet), "POST", "/wake_up", query="tags=weights&tags=kv_cache")
        assert browser.json["tags"] == fleet.engines[0].sent["wake_up"] == ["weights", "kv_cache"]


async def test_a_worker_is_quarantined_drained_and_released_by_hand():
    async with administered() as fleet:
        routes = serve(fleet)
        browser = await ask(routes, "POST", "/fleet/workers/w0/quarantine", query="reason=it%20smells")
        assert (browser.json["state"], browser.json["reason"]) == ("quarantined", "it smells")
        assert (await ask(routes, "POST", "/fleet/workers/w0/release")).json["state"] == "ready"
        drained = (await ask(routes, "POST", "/fleet/workers/w0/drain", b'{"reason": "a new disk"}')).json
        assert (drained["state"], drained["reason"]) == ("draining", "by 127.0.0.1: a new disk")
        assert [what for what, _ in fleet.journal if what != "state"] == ["quarantine", "release", "drain"]


@pytest.mark.parametrize("what", ["quarantine", "drain", "release"])
async def test_why_somebody_takes_a_worker_out_is_noted_and_nothing_else_is_taken(what):
    async with administered() as fleet:
        routes, path = serve(fleet), f"/fleet/workers/w0/{what}"
        for body, query, param in (
            (b'{"reason": 7}', "", "reason"),
            (b'{"why": "x"}', "", "why"),
            (b"because", "", None),
            (b"[]", "", None),
            (b"", "why=x", "why"),
        ):
            browser = await ask(routes, "POST", path, body, query)
            assert (browser.status, browser.json["error"]["param"]) == (400, param), (body, query)
        assert (fleet.states, fleet.journal) == (["ready", "ready"], [])
        assert (await ask(routes, "POST", path, b'{"reason": "it smells"}')).status == 200
        [noted] = [entry for entry in fleet.administration.journal.entries if entry.what == what]
        assert (noted.by, noted.detail["reason"]) == ("127.0.0.1", "it smells")


async def test_unknown_workers_are_a_404():
    async with administered() as fleet:
        assert (await ask(serve(fleet), "POST", "/workers/x/pause")).status == 404


async def test_an_update_in_pieces_is_passed_on_as_it_is():
    async with administered() as fleet:
        routes = serve(fleet)
        await ask(routes, "POST", "/start_weight_update")
        await ask(routes, "POST", "/update_weights", b'{"update_info":{"names":["w"],"dtype_names":["float32"],"shapes":[[1]]}}')
        assert [engine.sent["update"] for engine in fleet.engines] == [UPDATE] * 2
