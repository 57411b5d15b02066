"""A streamed call: what the client reads of it, and what becomes of it on the worker, on every end."""

import msgspec
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from core.beside import beside
from core.call import Call
from core.errors import CallError, WorkerLost
from core.hookspecs import hookimpl
from core.reply import Output
from core.settings import ServerSettings
from tests.unit.core.lanes import RefusedAtEntry, ScriptedLane, output
from tests.unit.core.rig import Browser, Rig, make_worker

TWO_TOKENS = [output(7), output(8, finish="stop", prompt=None, cached_tokens=1)]


def stream(**fields):
    return {"token_ids": [1, 2, 3], "sampling_params": fields.pop("sampling_params", {}), "stream": True, **fields}


async def test_a_stream_is_one_event_for_each_message_and_a_done():
    rig = Rig(make_worker("a", ScriptedLane(TWO_TOKENS)))
    browser = await Browser(stream(request_id="r1")).ask(rig)
    assert browser.status == 200
    assert browser.headers["content-type"] == "text/event-stream"
    assert browser.headers["x-headrace-worker"] == "a"
    assert browser.events == [
        {"request_id": "r1", "choices": [{"index": 0, "token_ids": [7]}]},
        {"request_id": "r1", "choices": [{"index": 0, "token_ids": [8], "finish_reason": "stop"}]},
        "[DONE]",
    ]
    assert browser.complete
    outcome = rig.outcome
    assert (outcome.kind, outcome.prompt_tokens, outcome.output_tokens, outcome.cached_tokens) == ("ok", 3, 2, 1)
    assert rig.in_flight == [0]


async def test_messages_that_have_arrived_together_are_written_together():
    rig = Rig(make_worker("a", ScriptedLane([[output(7), output(8)], output(9, finish="stop")])))
    browser = await Browser(stream()).ask(rig)
    assert [message["body"].count(b"data: ") for message in browser.messages[1:]] == [2, 1, 1]


async def test_usage_comes_at_the_end_when_it_was_asked_for():
    rig = Rig(make_worker("a", ScriptedLane([output(7), output(8, finish="stop", prompt=None, cached_tokens=1)])))
    browser = await Browser(stream(request_id="r1", stream_options={"include_usage": True})).ask(rig)
    assert [event.get("usage") for event in browser.events[:-2]] == [None, None]
    assert browser.events[-2] == {
        "request_id": "r1",
        "choices": [],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5, "prompt_tokens_details": {"cached_tokens": 1}},
    }


async def test_usage_comes_in_every_event_when_it_was_asked_for():
    rig = Rig(make_worker("a", ScriptedLane([output(7), output(8, finish="stop", prompt=None)])))
    browser = await Browser(stream(stream_options={"continuous_usage_stats": True})).ask(rig)
    assert [event["usage"]["completion_tokens"] for event in browser.events[:-1]] == [1, 2]


async def test_usage_counts_messages_up_to_its_own_event_even_when_they_arrived_together():
    rig = Rig(make_worker("a", ScriptedLane([[output(7), output(8, finish="stop", prompt=None)]])))
    browser = await Browser(stream(stream_options={"continuous_usage_stats": True})).ask(rig)
    assert [event["usage"]["completion_tokens"] for event in browser.events[:-1]] == [1, 2]


async def test_an_error_before_the_first_output_is_a_status():
    rig = Rig(make_worker("a", ScriptedLane([CallError(400, "no room")])))
    browser = await Browser(stream()).ask(rig)
    assert browser.status == 400
    assert browser.json["error"]["message"] == "no room"
    assert rig.outcome.kind == "refused"


async def test_an_error_after_the_first_output_is_an_event_and_then_the_usual_end():
    rig = Rig(make_worker("a", ScriptedLane([output(7), CallError(500, "engine failed")])))
    browser = await Browser(stream()).ask(rig)
    assert browser.status == 200
    assert browser.events[1:] == [
        {"error": {"message": "engine failed", "type": "InternalServerError", "param": None, "code": 500}},
        "[DONE]",
    ]
    assert browser.complete
    outcome = rig.outcome
    assert (outcome.kind, outcome.status, outcome.output_tokens) == ("failed", 500, 1)
    assert rig.in_flight == [0]


@pytest.mark.parametrize("script", [[WorkerLost("gone")], [RefusedAtEntry(WorkerLost("refused"))]])
@pytest.mark.parametrize("n", [1, 2])
async def test_a_worker_that_is_lost_before_its_first_output_means_another(script, n):
    rig = Rig(make_worker("a", ScriptedLane(script)), make_worker("b", ScriptedLane([output(7, finish="stop")])))
    browser = await Browser(stream(sampling_params={"n": n})).ask(rig)
    assert browser.status == 200
    assert len(browser.events) == n + 1
    assert browser.headers["x-headrace-worker"] == "b"
    assert (rig.outcome.kind, rig.outcome.attempts) == ("ok", 2)
    assert rig.workers[0]._suspected.is_set()
    assert rig.in_flight == [0, 0]


async def test_a_worker_that_is_lost_after_its_first_output_is_an_error_event_and_is_suspected():
    other = ScriptedLane([output(7, finish="stop")])
    rig = Rig(make_worker("a", ScriptedLane([output(7), WorkerLost("reset")])), make_worker("b", other))
    browser = await Browser(stream()).ask(rig)
    assert browser.events[1]["error"]["code"] == 503
    assert browser.events[-1] == "[DONE]"
    assert other.requests == []
    assert rig.workers[0]._suspected.is_set()
    assert rig.in_flight == [0, 0]


async def test_a_stream_on_a_worker_that_died_with_its_connections_standing_ends_with_an_error_event():
    worker = make_worker("a", ScriptedLane([output(7), trio.Event()]))
    rig = Rig(worker)
    async with trio.open_nursery() as nursery:
        browser = Browser(stream())
        nursery.start_soon(browser.ask, rig)
        await wait_all_tasks_blocked()
        worker.lose_calls()
    assert browser.events[-2]["error"]["message"].startswith("the worker was lost")
    assert browser.events[-1] == "[DONE]"
    assert (rig.outcome.kind, rig.in_flight) == ("failed", [0])


async def test_a_client_that_goes_away_cancels_the_stream_on_the_worker():
    lane = ScriptedLane([output(7), trio.Event()])
    rig = Rig(make_worker("a", lane))
    browser = Browser(stream())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(browser.ask, rig)
        await wait_all_tasks_blocked()
        assert rig.in_flight == [1]
        browser.gone.set()
    assert (lane.open, lane.cancelled) == (0, 1)
    assert (rig.outcome.kind, rig.outcome.output_tokens) == ("client-gone", 1)
    assert rig.in_flight == [0]


async def test_a_client_that_does_not_read_loses_its_worker_even_while_the_server_pins_the_write(autojump_clock):
    lane = ScriptedLane([output(7), trio.Event()])
    rig = Rig(make_worker("a", lane), server=ServerSettings(stall_timeout=8.0, keep_alive_interval=0))
    browser = Browser(stream())
    browser.reads = trio.Event()
    async with trio.open_nursery() as nursery, beside(rig.clients.run):
        nursery.start_soon(browser.ask, rig)
        await trio.sleep(7)
        assert lane.released == 0
        await trio.sleep(6)
        assert lane.released == 1
        browser.reads.set()
    assert lane.open == 0
    assert (rig.outcome.kind, rig.outcome.error) == ("client-gone", "stalled")
    assert rig.in_flight == [0]


async def test_a_stream_that_headrace_cancels_settles_as_cancelled():
    lane = ScriptedLane([output(7), trio.Event()])
    rig = Rig(make_worker("a", lane))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Browser(stream()).ask, rig)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert (rig.outcome.kind, rig.outcome.output_tokens) == ("cancelled", 1)
    assert (lane.cancelled, rig.in_flight) == (1, [0])


async def test_a_plugin_fault_in_a_stream_ends_it_with_an_error_event():
    class Broken:
        @hookimpl
        def lift_output(self, output: Output) -> None:
            if output.choice.finish_reason:
                raise ValueError

    lane = ScriptedLane([output(7), output(8, finish="stop")])
    rig = Rig(make_worker("a", lane), plugins=[Broken()])
    browser = await Browser(stream()).ask(rig)
    assert browser.events[1]["error"]["message"] == "plugin 'p0' failed in lift_output: ValueError"
    assert (rig.outcome.kind, rig.in_flight, lane.open) == ("failed", [0], 0)


async def test_an_idle_stream_gets_comments_and_a_busy_one_none(autojump_clock):
    more = trio.Event()
    rig = Rig(make_worker("a", ScriptedLane([output(7), more, output(8, finish="stop")])), server=ServerSettings(keep_alive_interval=10.0))
    browser = Browser(stream())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(browser.ask, rig)
        await trio.sleep(35)
        more.set()
    comments = [at for at, message in zip(browser.times, browser.messages, strict=True) if message.get("body") == b": keep-alive\n\n"]
    assert [round(at - browser.times[0]) for at in comments] == [10, 20, 30]
    assert [event if event == "[DONE]" else event["choices"][0]["token_ids"] for event in browser.events] == [[7], [8], "[DONE]"]


async def test_a_stream_that_waits_at_the_gate_gets_comments_and_its_later_error_is_an_event(autojump_clock):
    rig = Rig(make_worker("a", ScriptedLane([CallError(400, "no room")]), state="paused"), server=ServerSettings(keep_alive_interval=10.0))
    browser = Browser(stream())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(browser.ask, rig)
        await trio.sleep(15)
        assert browser.messages[1]["body"] == b": keep-alive\n\n"
        rig.move(rig.workers[0], "ready")
    assert browser.events == [{"error": {"message": "no room", "type": "BadRequestError", "param": None, "code": 400}}, "[DONE]"]


async def test_comments_can_be_turned_off(autojump_clock):
    rig = Rig(make_worker("a", ScriptedLane([trio.Event()])), server=ServerSettings(keep_alive_interval=0))
    browser = Browser(stream())
    with trio.move_on_after(1000):
        await browser.ask(rig)
    assert browser.messages == []


async def test_no_comment_follows_the_end_when_a_slow_client_takes_longer_than_the_interval(autojump_clock):
    """An ASGI server refuses a body after the last one."""
    rig = Rig(make_worker("a", ScriptedLane([output(7, finish="stop")])), server=ServerSettings(keep_alive_interval=10.0))
    browser = Browser(stream())
    send, ended = browser.send, False

    async def slow(message):
        nonlocal ended
        assert not ended, "a message after the last one"
        if b"[DONE]" in message.get("body", b""):
            ended = True
            await trio.sleep(45)
        await send(message)

    browser.send = slow
    await browser.ask(rig)
    assert browser.events[-1] == "[DONE]"


async def test_n_outputs_come_in_one_stream_under_their_indexes():
    rig = Rig(make_worker("a", ScriptedLane([output(7, finish="stop")], [output(8), output(9, finish="length")])))
    browser = await Browser(stream(sampling_params={"n": 2}, stream_options={"include_usage": True})).ask(rig)
    tokens = {0: [], 1: []}
    for event in browser.events[:-2]:
        tokens[event["choices"][0]["index"]] += event["choices"][0]["token_ids"]
    assert tokens == {0: [7], 1: [8, 9]}
    assert browser.events[-2]["usage"]["prompt_tokens"] == 3
    assert browser.events[-2]["usage"]["completion_tokens"] == 3
    assert rig.in_flight == [0]


async def test_one_of_n_streams_that_fails_ends_them_all_with_one_error():
    lane = ScriptedLane([output(7), trio.Event()], [CallError(500, "engine failed")])
    rig = Rig(make_worker("a", lane))
    browser = await Browser(stream(sampling_params={"n": 2})).ask(rig)
    if browser.status == 200:
        assert [event for event in browser.events if "error" in event] == [browser.events[-2]]
    else:
        assert browser.json["error"]["message"] == "engine failed"
    assert (lane.open, rig.outcome.kind, rig.in_flight) == (0, "failed", [0])


async def test_the_prompts_part_comes_in_the_first_event():
    first = output(7, prompt_token_ids=[1, 2, 3], prompt_logprobs=[None])
    browser = await Browser(stream(return_token_ids=True)).ask(Rig(make_worker("a", ScriptedLane([first, output(8, finish="stop")]))))
    assert browser.events[0]["prompt_token_ids"] == [1, 2, 3]
    assert "prompt_token_ids" not in browser.events[1]


async def test_every_hook_of_a_stream_sees_the_call():
    seen = []

    class Sees:
        @hookimpl
        def lift_output(self, call: Call, output: Output) -> None:
            seen.append((call.id, list(output.choice.token_ids)))
            output.choice.token_ids.append(99)

    rig = Rig(make_worker("a", ScriptedLane([output(7), output(8, finish="stop")])), plugins=[Sees()])
    browser = await Browser(stream(request_id="r1")).ask(rig)
    assert seen == [("r1", [7]), ("r1", [8])]
    assert browser.events[0]["choices"][0]["token_ids"] == [7, 99]
    assert msgspec.json.encode(browser.events[0]["choices"][0]).startswith(b'{"index":0,')
