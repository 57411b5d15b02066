"""Prime-RL's dialect: what the plugin adds, and what the path does already that its clients rely on."""

from itertools import product

import msgspec
import pytest
import structlog
from structlog.testing import capture_logs

from core import OVER_HTTP
from core.call import Call
from core.errors import CallError
from core.hookspecs import hookimpl
from core.northbound.body import parse_call
from core.registry import Loaded, Registry
from core.reply import Logprobs, PromptLogprob, TokenLogprob
from plugins.cache_salt import CacheSalt
from plugins.cache_salt import Settings as SaltSettings
from plugins.prime_rl import PrimeRL, Settings, unknown_keys
from plugins.prime_rl import bridged as bridged_module
from plugins.routed_experts import RoutedExperts
from plugins.routed_experts import Settings as RoutedSettings
from plugins.routing_round_robin import RoundRobin
from tests.unit.core.lanes import ScriptedLane, output
from tests.unit.core.rig import Browser, Rig, make_worker

SESSION = {"x-session-id": "trace-1"}


def prime(**settings) -> PrimeRL:
    return PrimeRL(Settings(**settings))


def rig_of(*outputs, plugins=None, **settings):
    lane = ScriptedLane(*[[each] for each in outputs])
    return Rig(make_worker("a", lane), plugins=plugins or [prime(**settings)]), lane


def body(**sampling):
    return {"token_ids": [1, 2, 3], "sampling_params": sampling}


@pytest.fixture
def logged(monkeypatch):
    """The log's events; a logger that was used before is bound to where it wrote then."""
    with capture_logs() as events:
        monkeypatch.setattr(unknown_keys, "log", structlog.stdlib.get_logger())
        yield events


# --- keys that nobody knows ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "headers", "status"),
    [
        ("in-sessions", SESSION, 200),
        ("in-sessions", {}, 400),
        ("ignore", {}, 200),
        ("ignore", SESSION, 200),
        ("refuse", SESSION, 400),
        ("refuse", {}, 400),
    ],
)
async def test_an_unknown_sampling_key_is_ignored_where_the_settings_say_so(setting, headers, status):
    rig, lane = rig_of(output(7, finish="stop"), unknown_sampling_keys=setting)
    browser = await Browser(body(min_p=0.5, guided_decoding_backend="x", top_q={"a": 1}), headers).ask(rig)
    assert browser.status == status
    if status == 200:
        assert lane.requests[0].sampling.min_p == 0.5
    else:
        assert browser.json["error"]["param"] == "sampling_params.guided_decoding_backend"


async def test_each_ignored_key_is_logged_once(logged):
    rig, _ = rig_of(output(7, finish="stop"))
    for keys in ({"junk": 1}, {"junk": 2}, {"junk": 3, "more": 4}):
        await Browser({**body(**keys), "request_id": "r1"}, SESSION).ask(rig)
    ignored = [event for event in logged if event["event"] == "sampling_params.ignored"]
    assert [event["key"] for event in ignored] == ["junk", "more"]
    assert {event["id"] for event in ignored} == {"r1"}


async def test_a_client_that_makes_up_keys_does_not_fill_the_log_or_the_memory(logged):
    plugin = prime(unknown_sampling_keys="ignore")
    for number in range(1100):
        plugin.receive_call(parse_call(msgspec.json.encode(body(**{f"{number}{'x' * 10_000}": 1})), {}))
    assert len(logged) == 1000
    assert max(len(event["key"]) for event in logged) == 100


async def test_an_unknown_key_at_the_top_of_the_body_is_refused_all_the_same():
    rig, _ = rig_of(output(7, finish="stop"), unknown_sampling_keys="ignore")
    browser = await Browser({**body(), "junk": 1}, SESSION).ask(rig)
    assert (browser.status, browser.json["error"]["param"]) == (400, "junk")


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
async def test_a_key_that_another_plugin_claims_reaches_it_in_whatever_order(order):
    class Claiming:
        seen = None

        @hookimpl
        def receive_call(self, call: Call) -> None:
            Claiming.seen = call.unclaimed_sampling.pop("theirs", None)

    plugins = [prime(), Claiming()]
    rig, _ = rig_of(output(7, finish="stop"), plugins=[plugins[i] for i in order])
    assert (await Browser(body(theirs=5), SESSION).ask(rig)).status == 200
    assert Claiming.seen == 5


async def test_the_salt_among_the_sampling_parameters_is_not_one_of_the_ignored_keys():
    rig, lane = rig_of(output(7, finish="stop"), plugins=[prime(), CacheSalt(SaltSettings())])
    await Browser(body(cache_salt="3", junk=1), SESSION).ask(rig)
    assert lane.requests[0].kv.cache_salt == "3"


# --- bridged turns ---------------------------------------------------------------------------------------------------------------


def bridged(headers=SESSION, also=(), **fields) -> Call:
    """A call with an offset after the plugins have seen it, `also` among them."""
    call = parse_call(msgspec.json.encode({**body(routed_experts_prompt_start=2), **fields}), headers)
    registry = Registry([Loaded("round-robin", RoundRobin()), Loaded("prime-rl", prime()), *also], ["round-robin"])
    registry.call("receive_call", call=call)
    return call


def test_the_offset_of_a_bridged_turn_is_no_wish_for_routed_experts():
    call = bridged()
    assert (call.sampling.routed_experts_prompt_start, call.needs) == (None, set())


def test_without_a_session_the_offset_stays_what_it_is():
    call = bridged(headers={})
    assert call.sampling.routed_experts_prompt_start == 2
    assert call.needs == {"sampling_params.routed_experts_prompt_start"}


@pytest.mark.parametrize(("always", "fields"), [(True, {}), (False, {"return_routed_experts": True})])
def test_where_routed_experts_are_asked_for_the_offset_is_kept(always, fields):
    call = bridged(also=[Loaded("routed-experts", RoutedExperts(RoutedSettings(always=always)))], **fields)
    assert call.sampling.routed_experts_prompt_start == 2
    assert OVER_HTTP in call.needs


def test_that_the_offset_is_ignored_is_logged_once(monkeypatch):
    with capture_logs() as events:
        monkeypatch.setattr(bridged_module, "log", structlog.stdlib.get_logger())
        plugin = prime()
        for _ in range(2):
            plugin.receive_call(parse_call(msgspec.json.encode(body(routed_experts_prompt_start=2)), SESSION))
    assert [event["key"] for event in events] == ["routed_experts_prompt_start"]


# --- finite logprobs -------------------------------------------------------------------------------------------------------------


def logprobs(*values):
    return Logprobs([TokenLogprob(100 + i, value, 1, f"token_id:{100 + i}") for i, value in enumerate(values)])


@pytest.mark.parametrize(("value", "at"), list(product([-9999.0, float("nan"), float("-inf"), float("inf")], range(3))))
async def test_a_logprob_that_is_not_finite_is_an_error_that_names_choice_position_and_token(value, at):
    values = [-0.5] * 3
    values[at] = value
    good, bad = (output(100, 101, 102, finish="stop", logprobs=logprobs(*each)) for each in ([-0.5] * 3, values))
    rig, _ = rig_of(good, bad)
    browser = await Browser(body(n=2, logprobs=1)).ask(rig)
    error = browser.json["error"]
    assert (browser.status, error["type"]) == (500, "InternalServerError")
    assert error["param"] == f"choices[1].logprobs.content[{at}]"
    assert error["message"].startswith(f"choices[1].logprobs.content[{at}]: the worker gave token {100 + at} the logprob {value}")
    assert (rig.outcome.kind, rig.outcome.status) == ("failed", 500)


async def test_logprobs_that_are_finite_pass_unchanged():
    rig, _ = rig_of(output(100, 101, finish="stop", logprobs=logprobs(-0.5, -9998.9)))
    browser = await Browser(body(logprobs=1)).ask(rig)
    assert [entry["logprob"] for entry in browser.json["choices"][0]["logprobs"]["content"]] == [-0.5, -9998.9]
    assert [entry["token"] for entry in browser.json["choices"][0]["logprobs"]["content"]] == ["token_id:100", "token_id:101"]


async def test_an_empty_output_with_logprobs_is_fine():
    rig, _ = rig_of(output(finish="stop", logprobs=logprobs()))
    browser = await Browser(body(logprobs=1)).ask(rig)
    assert (browser.status, browser.json["choices"][0]["logprobs"]) == (200, {"content": []})


async def test_logprobs_that_were_not_asked_for_are_nobodys_concern():
    rig, _ = rig_of(output(100, finish="stop", logprobs=logprobs(-9999.0)))
    assert (await Browser(body()).ask(rig)).status == 200


async def test_a_candidate_that_is_not_finite_is_no_error():
    content = logprobs(-0.5)
    content.content[0].top_logprobs = logprobs(-0.5, -9999.0).content  # pyright: ignore[reportAttributeAccessIssue]
    rig, _ = rig_of(output(100, finish="stop", logprobs=content))
    assert (await Browser(body(logprobs=2)).ask(rig)).status == 200


async def test_the_check_can_be_turned_off():
    rig, _ = rig_of(output(100, finish="stop", logprobs=logprobs(-9999.0)), finite_logprobs=False)
    assert (await Browser(body(logprobs=1)).ask(rig)).status == 200


async def test_a_prompt_token_without_a_finite_logprob_is_an_error_too():
    positions = [None, {"2": PromptLogprob(-0.5), "9": PromptLogprob(-9999.0)}, {"3": PromptLogprob(-9999.0)}]
    rig, _ = rig_of(output(100, finish="length", prompt_logprobs=positions))
    browser = await Browser(body(prompt_logprobs=1, max_tokens=1)).ask(rig)
    assert (browser.status, browser.json["error"]["param"]) == (500, "prompt_logprobs[2]")
    assert "token 3 " in browser.json["error"]["message"]


async def test_the_prompts_own_tokens_may_be_finite_with_any_candidates():
    positions = [None, {"2": PromptLogprob(-0.5), "9": PromptLogprob(-9999.0)}]
    rig, _ = rig_of(output(100, finish="length", prompt_logprobs=positions))
    browser = await Browser(body(prompt_logprobs=1, max_tokens=1)).ask(rig)
    assert list(browser.json["prompt_logprobs"][1]) == ["2", "9"]


# --- sessions --------------------------------------------------------------------------------------------------------------------


def test_the_session_is_the_header_that_rollouts_send_and_no_other():
    others = {"x-user-id": "u", "x-tenant-id": "t", "x-correlation-id": "c", "x-trace-id": "x"}
    data = msgspec.json.encode(body())
    assert parse_call(data, {**others, **SESSION}).session_id == "trace-1"
    assert parse_call(data, others).session_id == ""


async def test_the_session_goes_to_the_worker():
    rig, lane = rig_of(output(7, finish="stop"))
    await Browser(body(), SESSION).ask(rig)
    assert lane.requests[0].session_id == "trace-1"


# --- over-long prompts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        "This model's maximum context length is 2048 tokens. However, your prompt contains 3000 input tokens, which exceeds this limit even"
        " without any output tokens. Please reduce the length of the input prompt.",
        "this model's maximum context length is 2048 tokens, but the prompt contains 3000 input tokens",
    ],
    ids=["vLLM 0.33", "vLLM 0.31"],
)
async def test_an_over_long_prompt_is_a_400_in_the_workers_words(words):
    lane = ScriptedLane([CallError(400, words)])
    browser = await Browser(body(), SESSION).ask(Rig(make_worker("a", lane), plugins=[prime()]))
    assert (browser.status, browser.json["error"]["message"]) == (400, words)
