"""Routed experts on the path: who asks gets every row in the form that was asked for, or an error that says why not."""

import base64
from typing import Any

import pytest

from core.reply import FinishReason, Output
from core.wire.needs import RUST_HTTP_CAN
from plugins.routed_experts import RoutedExperts, Settings
from tests.unit.core.lanes import ScriptedLane, output
from tests.unit.core.rig import Browser, Rig, make_worker
from tests.unit.plugins.routed_experts.files import counted, encoded

PROMPT = [1, 2, 3]
#: A prompt of three tokens and an output of two: the last one has no row.
ROWS = 4


def answer(routed: Any, *tokens: int, finish: FinishReason | None = "length") -> Output:
    result = output(*tokens, finish=finish)
    result.choice.routed_experts = routed
    return result


def http_lane(*script: Output) -> ScriptedLane:
    return ScriptedLane(list(script), wire="http", can=RUST_HTTP_CAN)


async def ask(lane: ScriptedLane, settings: Settings | None = None, headers: dict[str, str] | None = None, **body: Any) -> Browser:
    sampling = body.pop("sampling_params", {})
    browser = Browser({"token_ids": PROMPT, "sampling_params": sampling, **body}, headers)
    return await browser.ask(Rig(make_worker("a", lane), plugins=[RoutedExperts(settings or Settings())]))


def rows(browser: Browser) -> Any:
    return browser.json["choices"][0]["routed_experts"]


@pytest.mark.parametrize("descr", ["|u1", "<u2", "<i4"])
async def test_the_file_becomes_raw_rows_with_the_data_first_and_without_spaces(descr):
    browser = await ask(http_lane(answer(encoded((ROWS, 2, 2), descr), 7, 8)), return_routed_experts=True)
    size = ROWS * 2 * 2 * int(descr[-1])
    data = base64.b64encode(counted(size)).decode()
    dtype = {"|u1": "uint8", "<u2": "uint16", "<i4": "int32"}[descr]
    assert f'"routed_experts":{{"data":"{data}","shape":[4,2,2],"start":0,"dtype":"{dtype}"}}'.encode() in browser.raw


async def test_rows_that_the_client_owns_are_left_out_and_the_start_says_so():
    lane = http_lane(answer(encoded((ROWS - 3, 2, 2)), 7, 8))
    browser = await ask(lane, sampling_params={"routed_experts_prompt_start": 3})
    assert (rows(browser)["start"], rows(browser)["shape"]) == (3, [1, 2, 2])


async def test_a_call_that_asks_goes_over_http_and_one_that_does_not_goes_as_it_would():
    both = make_worker("a", ScriptedLane([output(7, finish="stop")]), http_lane(answer(encoded((3, 2, 2)), 7)))
    for body, wire in (({}, "grpc"), ({"return_routed_experts": False}, "grpc"), ({"return_routed_experts": True}, "http")):
        rig = Rig(both, plugins=[RoutedExperts(Settings())])
        await Browser({"token_ids": PROMPT, "sampling_params": {}, **body}).ask(rig)
        assert rig.outcome.wire == wire


async def test_with_always_every_call_asks():
    browser = await ask(http_lane(answer(encoded((ROWS, 2, 2)), 7, 8)), Settings(always=True))
    assert rows(browser)["shape"] == [4, 2, 2]


async def test_with_always_a_null_is_no_no():
    browser = await ask(http_lane(answer(encoded((ROWS, 2, 2)), 7, 8)), Settings(always=True), return_routed_experts=None)
    assert rows(browser)["shape"] == [4, 2, 2]


@pytest.mark.parametrize(
    ("settings", "members", "named", "param"),
    [
        (Settings(), {"return_routed_experts": True}, "return_routed_experts", "return_routed_experts"),
        (Settings(always=True), {}, "plugins.routed-experts.always", None),
    ],
)
async def test_without_http_a_refusal_names_what_asks_for_it(settings, members, named, param):
    error = (await ask(ScriptedLane(), settings, **members)).json["error"]
    message = f"no worker can serve {named} (needs the Python HTTP server or the Rust HTTP server)"
    assert (error["code"], error["message"], error["param"]) == (400, message, param)


async def test_with_always_a_field_that_needs_grpc_is_refused_with_both_named():
    both = make_worker("a", ScriptedLane(), http_lane())
    rig = Rig(both, plugins=[RoutedExperts(Settings(always=True))])
    error = (await Browser({"token_ids": PROMPT, "sampling_params": {"logit_bias": {"1": 1}}}).ask(rig)).json["error"]
    assert error["message"] == (
        "no worker can serve plugins.routed-experts.always (needs the Python HTTP server or the Rust HTTP server) "
        "and sampling_params.logit_bias (needs grpc or the Python HTTP server) in one call"
    )
    assert error["param"] == "sampling_params.logit_bias"


@pytest.mark.parametrize("sampling", [{}, {"routed_experts_prompt_start": 3}])
async def test_who_says_no_goes_as_he_would_even_with_always(sampling):
    both = make_worker("a", ScriptedLane([output(7, finish="stop")]), http_lane(answer(encoded((3, 2, 2)), 7)))
    rig = Rig(both, plugins=[RoutedExperts(Settings(always=True))])
    browser = await Browser({"token_ids": PROMPT, "sampling_params": sampling, "return_routed_experts": False}).ask(rig)
    assert (rig.outcome.wire, rows(browser)) == ("grpc", None)


@pytest.mark.parametrize("stream", [False, True])
async def test_who_says_no_gets_none_of_a_worker_that_sends_them_to_all(stream):
    lane = http_lane(answer(encoded((ROWS, 2, 2)), 7, 8))
    browser = await ask(lane, Settings(always=True), return_routed_experts=False, stream=stream)
    assert (browser.status, b'"data":"' in browser.raw) == (200, False)


@pytest.mark.parametrize(("settings", "headers"), [(Settings(form="npy"), {}), (Settings(), {"x-headrace-routed-experts": "npy"})])
async def test_the_file_is_given_as_it_is_when_that_is_wanted(settings, headers):
    browser = await ask(http_lane(answer(encoded((ROWS, 2, 2)), 7, 8)), settings, headers, return_routed_experts=True)
    assert rows(browser) == encoded((ROWS, 2, 2))


async def test_a_call_can_ask_for_raw_rows_where_the_setting_is_npy():
    lane = http_lane(answer(encoded((ROWS, 2, 2)), 7, 8))
    browser = await ask(lane, Settings(form="npy"), {"x-headrace-routed-experts": "raw"}, return_routed_experts=True)
    assert rows(browser)["dtype"] == "uint8"


async def test_rows_that_nobody_asked_for_are_given_too():
    assert rows(await ask(http_lane(answer(encoded((ROWS, 2, 2)), 7, 8))))["shape"] == [4, 2, 2]


@pytest.mark.parametrize("form", ["raw", "npy"])
@pytest.mark.parametrize("count", [ROWS - 1, ROWS + 1, 0])
async def test_a_missing_or_surplus_row_is_an_error_that_counts_them(form, count):
    browser = await ask(http_lane(answer(encoded((count, 2, 2)), 7, 8)), Settings(form=form), return_routed_experts=True)
    assert browser.status == 502
    assert f"there are {count} rows, and the tokens from position 0 on make 4" in browser.json["error"]["message"]


@pytest.mark.parametrize("routed", ["", "AAAA", "no base64", "é", {"data": ""}, 7, [[1]]])
async def test_what_is_no_npy_file_is_an_error(routed):
    browser = await ask(http_lane(answer(routed, 7, 8)), return_routed_experts=True)
    assert (browser.status, browser.json["error"]["message"][:40]) == (502, "the worker's routed experts can't be use")


async def test_rows_that_do_not_come_although_they_were_asked_for_are_an_error():
    browser = await ask(http_lane(answer(None, 7, 8)), return_routed_experts=True)
    assert browser.status == 502
    assert "--enable-return-routed-experts" in browser.json["error"]["message"]


async def test_a_call_that_was_aborted_before_it_sampled_has_none():
    assert rows(await ask(http_lane(answer(None, finish="abort")), return_routed_experts=True)) is None


async def test_a_call_that_was_aborted_later_has_to_have_them():
    assert (await ask(http_lane(answer(None, 7, finish="abort")), return_routed_experts=True)).status == 502


async def test_each_of_several_outputs_has_its_own_rows():
    lane = ScriptedLane([answer(encoded((ROWS, 2, 2)), 7, 8)], [answer(encoded((3, 2, 2)), 9)], wire="http", can=RUST_HTTP_CAN)
    browser = await ask(lane, return_routed_experts=True, sampling_params={"n": 2})
    assert [choice["routed_experts"]["shape"][0] for choice in browser.json["choices"]] == [4, 3]


async def test_a_stream_has_the_rows_of_the_whole_output_in_its_last_chunk_only():
    last = answer(encoded((ROWS, 2, 2)), 8)
    last.completion_tokens = 2
    browser = await ask(http_lane(output(7), last), return_routed_experts=True, stream=True)
    found = [event["choices"][0].get("routed_experts") for event in browser.events[:-1]]
    assert found[0] is None
    assert found[1]["shape"] == [4, 2, 2]


async def test_a_stream_without_the_rows_that_were_asked_for_ends_with_an_error():
    browser = await ask(http_lane(output(7), answer(None, 8)), return_routed_experts=True, stream=True)
    assert "no routed experts" in browser.events[-2]["error"]["message"]


async def test_a_stream_without_counts_ends_with_an_error():
    last = answer(encoded((ROWS, 2, 2)), 8)
    last.completion_tokens = None
    browser = await ask(http_lane(output(7), last), return_routed_experts=True, stream=True)
    assert "can't be checked" in browser.events[-2]["error"]["message"]


async def test_only_workers_that_capture_are_eligible():
    captures, other = (make_worker(name, http_lane(answer(encoded((3, 2, 2)), 7))) for name in "ab")
    rig = Rig(other, captures, plugins=[RoutedExperts(Settings(workers=("a",)))])
    for _ in range(3):
        browser = await Browser({"token_ids": PROMPT, "sampling_params": {}, "return_routed_experts": True}).ask(rig)
        assert browser.headers["x-headrace-worker"] == "a"


async def test_without_a_worker_that_captures_the_call_is_refused():
    browser = await ask(http_lane(), Settings(workers=("b",)), return_routed_experts=True)
    assert (browser.status, browser.json["error"]["param"]) == (400, "return_routed_experts")


@pytest.mark.parametrize(
    ("body", "headers", "param"),
    [
        ({"return_routed_experts": "yes"}, {}, "return_routed_experts"),
        ({"return_routed_experts": 1}, {}, "return_routed_experts"),
        ({"return_routed_experts": True}, {"x-headrace-routed-experts": "json"}, "x-headrace-routed-experts"),
        ({"sampling_params": {"routed_experts_prompt_start": -1}}, {}, "sampling_params.routed_experts_prompt_start"),
    ],
)
async def test_a_wrong_request_is_refused_with_the_field(body, headers, param):
    browser = await ask(http_lane(), None, headers, **body)
    assert (browser.status, browser.json["error"]["param"]) == (400, param)


async def test_after_a_remote_prefill_the_prompt_has_no_rows_here():
    prefilled: dict[str, Any] = {"kv_transfer_params": {"do_remote_prefill": True}}
    browser = await ask(http_lane(), return_routed_experts=True, **prefilled)
    assert browser.status == 400
    assert "take the prompt's rows from the prefill's reply" in browser.json["error"]["message"]
    lane = http_lane(answer(encoded((1, 2, 2)), 7, 8))
    browser = await ask(lane, sampling_params={"routed_experts_prompt_start": 3}, **prefilled)
    assert rows(browser)["start"] == 3
