"""What each worker is asked, and how one reply is made of their answers."""

import base64
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from google.protobuf.json_format import MessageToDict
from msgspec.structs import replace

from core.call import Call, Identity
from core.errors import CallError
from core.explaining import Explainer
from core.fleet.worker import Worker
from core.hookspecs import Choice, hookimpl
from core.northbound.body import parse_call
from core.reply import PromptLogprob
from core.wire.needs import RUST_HTTP_CAN
from plugins.disaggregation import Settings
from plugins.disaggregation.legs import HAND_OVER
from plugins.routed_experts import RoutedExperts
from plugins.routed_experts import Settings as RowsSettings
from tests.unit.core.lanes import ScriptedLane, output
from tests.unit.core.rig import Browser, make_call, make_worker
from tests.unit.plugins.disaggregation.fleet import HANDOFF, Fleet, decode, lane, prefill, prefilled
from tests.unit.plugins.routed_experts.files import encoded

SAMPLING = {"max_tokens": 2, "min_tokens": 2, "stop": ["x"], "stop_token_ids": [5], "seed": 3, "temperature": 0.5, "logprobs": 0}


def params(request: Any) -> Any:
    return MessageToDict(request.kv.kv_transfer_params)


async def test_a_call_is_computed_by_a_prefill_worker_and_answered_by_a_decode_worker():
    for stream in (False, True):
        p, d = prefill(), decode()
        fleet = Fleet(p, d)
        browser = await fleet.ask(sampling_params={"max_tokens": 2}, stream=stream)
        assert browser.headers["x-headrace-worker"] == "d"
        assert browser.headers["x-headrace-route"] == "prefill=p (round-robin), decode=d (round-robin)"
        choices = [event["choices"][0] for event in browser.events[:-1]] if stream else browser.json["choices"]
        assert [token for choice in choices for token in choice["token_ids"]] == [8, 9]
        [first], [second] = lane(p).requests, lane(d).requests
        assert (first.request_id, second.request_id) == ("r1", "r1")
        assert params(first) == HAND_OVER
        assert params(second) == HANDOFF
        assert (first.stopping.max_new_tokens, second.stopping.max_new_tokens) == (1, 2)
        assert fleet.in_flight == [0, 0]


@pytest.mark.parametrize(
    ("settings", "sampling", "legs"),
    [
        (Settings(), {}, ["prefill=p (round-robin)"]),
        (Settings(threshold=4), {}, ["no prefill elsewhere: the prompt has 3 tokens, fewer than 4 (threshold)"]),
        (Settings(), {"n": 2, "temperature": 1.0}, ["no prefill elsewhere: of n outputs each would need it"]),
    ],
)
async def test_who_asks_where_a_call_would_go_is_told_of_both_parts(settings, sampling, legs):
    p, d = prefill(), decode()
    fleet = Fleet(p, d, settings=settings)
    explainer = Explainer(fleet.registry, fleet.fleet, fleet.placer, fleet.path)
    body = {"token_ids": [1, 2, 3], "sampling_params": sampling}
    explanation = await explainer.explain(parse_call(msgspec.json.encode(body), {}))
    assert explanation.choice
    assert (explanation.choice.worker, explanation.legs) == ("d", legs)
    assert (lane(p).requests, lane(d).requests) == ([], [])


async def test_a_part_that_could_go_nowhere_is_told_too():
    p, d = prefill(), decode()
    fleet = Fleet(p, d)
    fleet.move(p, "gone")
    explanation = await Explainer(fleet.registry, fleet.fleet, fleet.placer, fleet.path).explain(make_call())
    assert explanation.legs == ["prefill: nowhere now: no worker is ready: p is gone (in a test), d is decode, and the call wants prefill"]


async def test_the_prefill_is_the_same_call_less_what_shapes_more_than_one_token():
    p, d = prefill(), decode()
    await Fleet(p, d).ask(sampling_params=SAMPLING, cache_salt="v7", priority=3)
    [first], [second] = lane(p).requests, lane(d).requests
    for request in (first, second):
        assert (request.kv.cache_salt, request.priority, request.sampling.seed, request.temperature) == ("v7", 3, 3, 0.5)
        assert request.response.output_logprobs
    assert (first.stopping.min_new_tokens, first.stopping.ignore_eos) == (0, True)
    assert (list(first.stopping.stop_strings), list(first.stopping.stop_token_ids)) == ([], [5])
    assert (second.stopping.min_new_tokens, second.stopping.ignore_eos) == (2, False)
    assert (list(second.stopping.stop_strings), list(second.stopping.stop_token_ids)) == (["x"], [5])


@pytest.mark.parametrize("stream", [False, True])
async def test_what_concerns_the_prompt_comes_from_the_prefill(stream):
    logprobs = [None, {"2": PromptLogprob(-1.0, 1)}, {"3": PromptLogprob(-2.0, 4)}]
    p = prefill(prefilled(prompt_logprobs=logprobs, prompt_token_ids=[1, 2, 3], cached_tokens=2), http=True)
    d = decode(output(8), output(9, finish="length", completion_tokens=2, cached_tokens=3), http=True)
    fleet = Fleet(p, d)
    wanted = {"sampling_params": {"max_tokens": 2, "prompt_logprobs": 0}, "return_token_ids": True}
    if stream:
        wanted |= {"stream": True, "stream_options": {"include_usage": True}}
    browser = await fleet.ask(**wanted)
    told, usage = (browser.events[0], browser.events[-2]["usage"]) if stream else (browser.json, browser.json["usage"])
    assert told["prompt_logprobs"] == msgspec.to_builtins(logprobs)
    assert told["prompt_token_ids"] == [1, 2, 3]
    assert usage == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5, "prompt_tokens_details": {"cached_tokens": 2}}
    if stream:
        assert not any("prompt_logprobs" in event for event in browser.events[1:-1])
    assert (fleet.outcome.prompt_tokens, fleet.outcome.output_tokens, fleet.outcome.cached_tokens) == (3, 2, 2)
    [first], [second] = lane(p).requests, lane(d).requests
    assert (first.response.prompt_logprobs, first.response.prompt_token_ids) == (True, True)
    assert (second.response.prompt_logprobs, second.response.prompt_token_ids) == (False, False)


async def test_what_the_decode_worker_takes_for_cached_was_not():
    known = await Fleet(prefill(prefilled(handoff={**HANDOFF, "remote_prefill_cached_tokens": 1})), decode()).ask()
    unknown = await Fleet(prefill(), decode(output(8, finish="stop", cached_tokens=3))).ask()
    assert known.json["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
    assert unknown.json["usage"]["prompt_tokens_details"] is None


async def test_neither_worker_needs_what_only_the_other_one_is_asked():
    p, d = prefill(http=True), decode()  # the one has HTTP only, the other gRPC only
    asked = {"prompt_logprob_token_ids": [[1], [2], [3]], "prompt_logprob_start": 0, "stop": ["x"]}
    assert (await Fleet(p, d).ask(sampling_params=asked)).status == 200


@pytest.mark.parametrize(("id_", "wire"), [(2**53 - 1, "grpc"), (2**53, "http")])
async def test_a_hand_off_that_grpc_would_change_goes_to_the_decode_worker_over_http(id_, wire):
    script = [output(8), output(9, finish="length", completion_tokens=2)]
    d = make_worker("d", ScriptedLane(script), ScriptedLane(script, wire="http", can=RUST_HTTP_CAN), role="decode")
    fleet = Fleet(prefill(prefilled(handoff={**HANDOFF, "remote_id": id_}), http=True), d)
    assert ((await fleet.ask()).status, fleet.outcome.wire) == (200, wire)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("start", [0, 2, 3])
async def test_rows_of_routed_experts_are_joined(start, stream):
    first, second = encoded((3 - start, 2, 2)), encoded((1, 2, 2))
    said = prefilled()
    said.choice.routed_experts = first
    last = output(9, finish="length", completion_tokens=2)
    last.choice.routed_experts = second
    p, d = prefill(said, http=True), decode(output(8), last, http=True)
    fleet = Fleet(p, d, plugins=(RoutedExperts(RowsSettings()),))
    browser = await fleet.ask(sampling_params={"routed_experts_prompt_start": start}, return_routed_experts=True, stream=stream)
    [choice] = browser.events[-2]["choices"] if stream else browser.json["choices"]
    rows = choice["routed_experts"]
    assert (rows["shape"], rows["start"], rows["dtype"]) == ([4 - start, 2, 2], start, "uint8")
    assert base64.b64decode(rows["data"]) == bytes([*range(4 * (3 - start)), *range(4)])


async def test_rows_that_do_not_fit_are_refused():
    wrong = [
        (None, encoded((1, 2, 2)), "prefill gave none: start vLLM with --enable-return-routed-experts"),
        (encoded((3, 2, 2)), None, "decode gave none"),
        (encoded((2, 2, 2)), encoded((1, 2, 2)), "prefill gave 2 rows instead of 3"),
        (encoded((3, 2, 2)), encoded((4, 2, 2)), "decode gave 4 rows instead of 1"),
        (encoded((3, 2, 2)), encoded((1, 2, 4)), "they differ in type or shape"),
        (encoded((3, 2, 2)), encoded((1, 2, 2), "<u2"), "they differ in type or shape"),
        ("no base64!", encoded((1, 2, 2)), "Only base64 data is allowed"),
        (encoded((3, 2, 2)), base64.b64encode(b"short").decode(), "what decode gave is no .npy file"),
    ]
    for first, second, why in wrong:
        said, last = prefilled(), output(8, 9, finish="length")
        said.choice.routed_experts, last.choice.routed_experts = first, second
        fleet = Fleet(prefill(said, http=True), decode(last, http=True))
        browser = await fleet.ask(sampling_params={"routed_experts_prompt_start": 0})
        assert browser.status == 502
        assert why in browser.json["error"]["message"]


async def test_a_single_token_has_no_row():
    said, last = prefilled(), output(8, finish="stop")
    said.choice.routed_experts = encoded((3, 2, 2))
    browser = await Fleet(prefill(said, http=True), decode(last, http=True)).ask(sampling_params={"routed_experts_prompt_start": 0})
    assert browser.json["choices"][0]["routed_experts"] == encoded((3, 2, 2))


class Sees:
    """Every call has an image."""

    @hookimpl
    def identify_call(self, call: Call) -> None:
        call.identity = Identity(media=("image:1",))  # pyright: ignore[reportArgumentType] - whatever a medium's identity is


async def test_an_encode_worker_comes_first_and_what_it_returns_goes_on():
    encoder = make_worker("e", *prefill(output(7, finish="stop", ec_transfer_params={"ec_items": ["x"], "port": 5})).lanes, role="encode")
    whole = make_worker("a", *decode().lanes)
    browser = await Fleet(encoder, whole, plugins=(Sees(),)).ask()
    assert browser.headers["x-headrace-route"] == "encode=e (round-robin), aggregated=a (round-robin)"
    assert (params(lane(encoder).requests[0]), lane(encoder).requests[0].stopping.max_new_tokens) == ({}, 1)
    assert MessageToDict(lane(whole).requests[0].kv.ec_transfer_params) == {"ec_items": ["x"], "port": 5}

    p, d = prefill(), decode()
    browser = await Fleet(encoder, p, d, plugins=(Sees(),)).ask()
    assert browser.headers["x-headrace-route"] == "encode=e (round-robin), prefill=p (round-robin), decode=d (round-robin)"
    assert MessageToDict(lane(p).requests[0].kv.ec_transfer_params) == {"ec_items": ["x"], "port": 5}
    assert MessageToDict(lane(d).requests[0].kv.ec_transfer_params) == {}


async def test_a_client_that_has_had_its_media_encoded_is_followed():
    encoder, whole = make_worker("e", *prefill().lanes, role="encode"), make_worker("a", *decode().lanes)
    browser = await Fleet(encoder, whole, plugins=(Sees(),)).ask(ec_transfer_params={"mine": 1})
    assert browser.headers["x-headrace-route"] == "round-robin"
    assert MessageToDict(lane(whole).requests[0].kv.ec_transfer_params) == {"mine": 1}


async def test_a_call_without_media_has_nothing_to_encode():
    encoder, whole = make_worker("e", *prefill().lanes, role="encode"), make_worker("a", *decode().lanes)
    assert (await Fleet(encoder, whole).ask()).headers["x-headrace-route"] == "round-robin"


async def test_what_is_not_worth_a_hand_off_stays_on_the_decode_worker():
    p = prefill()
    for settings, body in (
        (Settings(threshold=4), {}),
        (Settings(), {"sampling_params": {"n": 2}}),
        (Settings(), {"sampling_params": {"skip_reading_prefix_cache": True}}),
    ):
        d = decode(output(8, finish="stop"))
        browser = await Fleet(p, d, settings=settings).ask(**body)
        assert (browser.status, browser.headers["x-headrace-worker"], lane(p).requests) == (200, "d", [])
        assert params(lane(d).requests[0]) == {}
    assert (await Fleet(p, decode(), settings=Settings(threshold=3)).ask()).headers["x-headrace-route"].startswith("prefill=p")


class Knows:
    """A policy that takes two tokens of each prompt to be cached on the last worker, and chooses it."""

    @hookimpl
    def choose_worker(self, workers: Sequence[Worker]) -> Choice:
        return Choice(workers[-1], "knows", cached_tokens=2)


@pytest.mark.parametrize(
    ("threshold", "sampling", "alone"),
    [
        (2, {}, True),
        (1, {}, False),
        (0, {}, False),
        (2, {"prompt_logprobs": 0}, False),
        (2, {"prompt_logprob_token_ids": [[1], [2], [3]]}, False),  # which a decode worker without HTTP can't be asked
    ],
)
async def test_a_prompt_that_is_mostly_cached_stays_where_it_is(threshold, sampling, alone):
    p, d, other = prefill(http="prompt_logprob_token_ids" in sampling), decode(), decode(name="other")
    fleet = Fleet(p, other, d, settings=Settings(threshold=threshold), plugins=(Knows(),), policy="p1")
    browser = await fleet.ask(sampling_params=sampling)
    assert browser.status == 200
    assert browser.headers["x-headrace-route"] == ("knows" if alone else "prefill=p (knows), decode=d (knows)")
    assert len(lane(p).requests) == (not alone)
    assert (params(lane(d).requests[0]) == {}) == alone


async def test_a_model_without_both_roles_is_not_disaggregated():
    whole = make_worker("a", *decode().lanes, models=("other",))
    p, d = prefill(), decode()
    assert (await Fleet(p, d, whole).ask(model="other")).headers["x-headrace-worker"] == "a"
    assert (await Fleet(p, whole).ask(model="other")).headers["x-headrace-worker"] == "a"
    assert (await Fleet(d).ask()).headers["x-headrace-route"] == "round-robin"


async def test_a_client_that_disaggregates_by_itself_is_followed():
    p, d = prefill(), decode()
    fleet = Fleet(p, d)
    first = await fleet.ask(kv_transfer_params=HAND_OVER, sampling_params={"max_tokens": 1})
    assert (first.headers["x-headrace-worker"], first.json["kv_transfer_params"]) == ("p", HANDOFF)
    second = await fleet.ask(kv_transfer_params=first.json["kv_transfer_params"])
    assert (second.headers["x-headrace-worker"], second.json["choices"][0]["token_ids"]) == ("d", [8, 9])
    assert params(lane(d).requests[0]) == HANDOFF


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"sampling_params": {"n": 2}, "kv_transfer_params": HANDOFF}, "sampling_params.n"),
        ({"sampling_params": {"prompt_logprobs": 0}, "kv_transfer_params": HANDOFF}, "sampling_params.prompt_logprobs"),
        ({"sampling_params": {"max_tokens": 1, "min_tokens": 2}}, "sampling_params.min_tokens"),
        ({"sampling_params": {"min_tokens": 98}}, "sampling_params.min_tokens"),
        ({"sampling_params": {"stop": ""}}, "sampling_params.stop"),
        ({"sampling_params": {"stop": ["x", ""]}}, "sampling_params.stop"),
        ({"sampling_params": {"trace_decode_token_ids": [1]}}, "sampling_params.trace_decode_token_ids"),
    ],
)
async def test_what_cannot_be_done_is_refused_before_anything_is_asked(body, param):
    p, d = prefill(), decode()
    browser = await Fleet(p, d).ask(**body)
    assert (browser.status, browser.json["error"]["param"]) == (400, param)
    assert not lane(p).requests
    assert not lane(d).requests


async def test_what_a_decode_worker_could_not_take_is_refused_before_anything_is_asked():
    p, d = prefill(http=True), decode(http=True)
    fleet = Fleet(p, d)
    d.info = replace(d.info, max_model_len=3) if d.info else None
    long = await fleet.ask()
    assert (long.status, long.json["error"]["param"]) == (400, "input_tokens")
    interval = await fleet.ask(sampling_params={"stream_interval": 0})
    assert (interval.status, interval.json["error"]["param"]) == (400, "sampling_params.stream_interval")
    rank = await Browser({"token_ids": [1], "sampling_params": {}}, {"x-data-parallel-rank": "5"}).ask(Fleet(p, decode()))
    assert (rank.status, rank.json["error"]["param"]) == (400, "x-data-parallel-rank")
    assert lane(p).requests == []


async def test_a_prompt_that_no_worker_can_take_is_refused_in_the_words_of_the_prefill():
    p, d = prefill(CallError(400, "maximum context length", param="input_tokens")), decode()
    browser = await Fleet(p, d).ask(token_ids=[1] * 100)
    assert (browser.status, browser.json["error"]["message"]) == (400, "maximum context length")
