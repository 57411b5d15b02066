"""Policy versions over gRPC, which doesn't tell them: from what headrace knows, and null where nobody can know."""

from itertools import pairwise

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import wait_all_tasks_blocked

from core.reply import WeightVersion
from core.versions import StreamedVersions
from tests.unit.core.lanes import ScriptedLane, output
from tests.unit.core.rig import Browser, Rig, make_worker

BODY = {"token_ids": [1, 2, 3], "sampling_params": {}}


def labelled(*scripts, version: str | None = "7", **options):
    worker = make_worker("a", ScriptedLane(*scripts, **options))
    worker.policy_version = version
    return worker


def span(version, start, end):
    return {"version": version, "start": start, "end": end}


async def unary(worker, **body):
    choices = (await Browser({**BODY, **body}).ask(Rig(worker))).json["choices"]
    return [choice["weight_versions"] for choice in choices]


async def streamed(worker, between, reads=None, **body):
    """The spans of each choice; `between` runs when everything has come to a standstill."""
    browser = Browser({**BODY, "stream": True, **body})
    browser.reads = reads
    async with trio.open_nursery() as nursery:
        nursery.start_soon(browser.ask, Rig(worker))
        await wait_all_tasks_blocked()
        await between()
    choices = [event["choices"][0] for event in browser.events if event != "[DONE]"]
    return {choice["index"]: choice.get("weight_versions") for choice in choices if "finish_reason" in choice}


async def test_a_unary_reply_has_one_span():
    assert await unary(labelled([output(7, 8, finish="stop")])) == [[span("7", 0, 2)]]


async def test_each_of_several_outputs_has_one():
    worker = labelled([output(7, 8, finish="stop")], [output(7, finish="stop")])
    assert await unary(worker, sampling_params={"n": 2}) == [[span("7", 0, 2)], [span("7", 0, 1)]]


async def test_an_output_without_tokens_has_none():
    assert await unary(labelled([output(finish="abort")])) == [[]]


async def test_a_worker_that_tells_no_version_has_null():
    assert await unary(labelled([output(7, finish="stop")], version=None)) == [None]


@pytest.mark.parametrize("back", [False, True])
async def test_the_split_of_a_unary_reply_is_not_known(back):
    frozen = trio.Event()
    worker = labelled([frozen, output(7, 8, finish="stop")])
    browser = Browser(BODY)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(browser.ask, Rig(worker))
        await wait_all_tasks_blocked()
        worker.policy_version = "8"
        if back:
            worker.policy_version = "7"
        frozen.set()
    assert browser.json["choices"][0]["weight_versions"] is None


async def test_what_comes_over_http_is_the_workers_own():
    told = output(7, finish="stop")
    told.choice.weight_versions = [WeightVersion("of the worker", 0, 1)]
    assert await unary(labelled([told], wire="http")) == [[span("of the worker", 0, 1)]]
    assert await unary(labelled([output(7, finish="stop")], wire="http")) == [None]


async def test_a_stream_says_it_at_its_end():
    async def nothing():
        pass

    worker = labelled([output(7), output(8, 9), output(10, finish="stop")])
    assert await streamed(worker, nothing) == {0: [span("7", 0, 4)]}


async def test_a_stream_is_split_where_its_engine_was_frozen():
    frozen = trio.Event()
    worker = labelled([output(7), output(8, 9), frozen, output(10), output(11, finish="stop")])

    async def update():
        worker.policy_version = "8"
        frozen.set()

    assert await streamed(worker, update) == {0: [span("7", 0, 3), span("8", 3, 5)]}


async def test_a_stream_that_had_no_token_yet_is_of_the_new_version_alone():
    frozen = trio.Event()
    worker = labelled([frozen, output(10), output(11, finish="stop")])

    async def update():
        worker.policy_version = "8"
        frozen.set()

    assert await streamed(worker, update) == {0: [span("8", 0, 2)]}


async def test_versions_that_made_no_token_and_a_label_that_came_back_leave_no_trace():
    frozen = trio.Event()
    worker = labelled([output(7), frozen, output(8, finish="stop")])

    async def updates():
        for version in ("8", "9", "7"):
            worker.policy_version = version
        frozen.set()

    assert await streamed(worker, updates) == {0: [span("7", 0, 2)]}


async def test_each_output_of_a_stream_is_split_for_itself():
    frozen = trio.Event()
    worker = labelled(
        [output(7), output(8), frozen, output(9, finish="stop", index=0)], [output(7, index=1), frozen, output(9, finish="stop", index=1)]
    )

    async def update():
        worker.policy_version = "8"
        frozen.set()

    spans = await streamed(worker, update, sampling_params={"n": 2})
    assert spans == {0: [span("7", 0, 2), span("8", 2, 3)], 1: [span("7", 0, 1), span("8", 1, 2)]}


async def test_a_change_that_a_probe_has_found_has_no_known_place():
    frozen = trio.Event()
    worker = labelled([output(7), frozen, output(8, finish="stop")])

    async def find():
        worker.find_version("8")
        frozen.set()

    assert await streamed(worker, find) == {0: None}


async def test_a_probe_that_finds_what_is_known_changes_nothing():
    frozen = trio.Event()
    worker = labelled([output(7), frozen, output(8, finish="stop")])

    async def find():
        worker.find_version("7")
        frozen.set()

    assert await streamed(worker, find) == {0: [span("7", 0, 2)]}


async def test_a_change_while_the_client_was_behind_has_no_known_place():
    reads = trio.Event()
    worker = labelled([output(7), output(8), output(9, finish="stop")])

    async def update():
        worker.policy_version = "8"
        reads.set()

    assert await streamed(worker, update, reads) == {0: None}


@given(st.lists(st.one_of(st.sampled_from(["1", "2", "3"]), st.integers(1, 5)), max_size=30))
def test_spans_are_contiguous_cover_the_output_and_say_of_each_token_what_was_in_force(steps):
    worker = labelled(version="0")
    versions, truth = StreamedVersions(worker), []
    versions.wait()
    for step in steps:
        if isinstance(step, str):
            worker.policy_version = step
            continue
        truth += [worker.policy_version] * step
        versions.tell([output(*[1] * step)])
        versions.wait()
    last = output(finish="stop")
    versions.tell([last])
    spans = last.choice.weight_versions
    assert spans is not None
    assert [part.version for part in spans for _ in range(part.end - part.start)] == truth
    assert [part.start for part in spans] == [0, *(part.end for part in spans)][: len(spans)]
    assert all(one.version != other.version for one, other in pairwise(spans))
