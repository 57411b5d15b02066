"""The salt of a call: found in every place, one for all of them, and held to vLLM's rules."""

from collections.abc import Mapping
from hashlib import sha256
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from core import BadRequest, Call, Identity, NoWorker
from core.errors import WorkerLost
from core.hookspecs import hookimpl
from core.northbound.body import parse_call
from core.settings import SettingsError, convert_settings
from plugins.cache_salt import CacheSalt, Settings
from plugins.cache_salt.rule import salt_of_version
from tests.unit.core.lanes import ScriptedLane, output
from tests.unit.core.rig import Browser, Rig, make_call, make_worker

BODY: dict[str, Any] = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 4}}
RULE = r"Parameter 'cache_salt' must be a non-empty string of at most 128 characters and must not contain '@', '/', '\', or NUL."
#: Each place: its name in an error, the path of its field, and how a salt is written there.
PLACES = {
    "the body": ("cache_salt", lambda salt: ({"cache_salt": salt}, {})),
    "sampling_params.cache_salt": ("sampling_params.cache_salt", lambda salt: ({"sampling_params": {"cache_salt": salt}}, {})),
    "extra_body.cache_salt": ("extra_body.cache_salt", lambda salt: ({"extra_body": {"cache_salt": salt}}, {})),
    "nvext.cache_salt": ("nvext.cache_salt", lambda salt: ({"nvext": {"cache_salt": salt}}, {})),
    "the header X-Cache-Salt": ("x-cache-salt", lambda salt: ({}, {"x-cache-salt": salt.encode().decode("latin-1")})),
}
allowed = st.text(st.characters(exclude_characters="@/\\\0", exclude_categories=["Cs"]), min_size=1, max_size=128)
#: Salts that are none, of every kind.
not_allowed = st.one_of(
    st.just(""),
    st.text(st.characters(exclude_categories=["Cs"]), min_size=129, max_size=140),
    st.builds("{}{}{}".format, st.text("ab", max_size=3), st.sampled_from("@/\\\0"), st.text("ab", max_size=3)),
)


def received(body=None, headers=None, **settings) -> Call:
    """A call after the plugin has seen it."""
    call = parse_call(msgspec.json.encode({**BODY, **(body or {})}), headers or {})
    CacheSalt(Settings(**settings)).receive_call(call)
    return call


def refused(body=None, headers=None, **settings) -> BadRequest:
    with pytest.raises(BadRequest) as raised:
        received(body, headers, **settings)
    return raised.value


def written(salts: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """A body and headers with a salt in each of the places."""
    body: dict[str, Any] = {}
    headers: dict[str, str] = {}
    for place, salt in salts.items():
        more, more_headers = PLACES[place][1](salt)
        body |= more
        headers |= more_headers
    return body, headers


@given(st.sets(st.sampled_from(sorted(PLACES)), min_size=1), allowed)
@example({*PLACES}, "0")
def test_a_salt_is_found_in_every_place_and_equal_ones_are_one(places, salt):
    call = received(*written(dict.fromkeys(places, salt)))
    assert call.cache_salt == salt
    assert (call.unclaimed, call.unclaimed_sampling) == ({}, {})


@given(st.dictionaries(st.sampled_from(sorted(PLACES)), allowed, min_size=2).filter(lambda salts: len(set(salts.values())) > 1))
def test_different_salts_are_refused_with_both_places(salts):
    error = refused(*written(salts))
    first, second = [place for place in PLACES if place in error.message]
    assert error.message == f"cache_salt: {first} says {salts[first]!r} and {second} says {salts[second]!r}; send one"
    assert salts[first] != salts[second]
    assert error.param == PLACES[second][0]


def test_a_conflict_reads_as_a_person_would_say_it():
    error = refused({"cache_salt": "7", "sampling_params": {"cache_salt": "8"}})
    assert error.message == "cache_salt: the body says '7' and sampling_params.cache_salt says '8'; send one"


@given(st.sampled_from(sorted(PLACES)), not_allowed)
def test_what_vllm_refuses_is_refused_in_every_place_in_its_words(place, salt):
    path = PLACES[place][0]
    error = refused(*written({place: salt}))
    assert error.param == path
    assert error.message == (RULE if path == "cache_salt" else f"{path}: {RULE}")


@pytest.mark.parametrize("value", [7, True, 1.5, [], ["7"], {}, {"a": [1]}])
@pytest.mark.parametrize("place", [place for place in PLACES if place not in ("the body", "the header X-Cache-Salt")])
def test_what_is_no_text_is_no_salt(place, value):
    assert refused(PLACES[place][1](value)[0]).message == f"{PLACES[place][0]}: {RULE}"


@pytest.mark.parametrize("place", [place for place in PLACES if place != "the header X-Cache-Salt"])
def test_a_null_is_no_salt_and_no_conflict(place):
    assert received(PLACES[place][1](None)[0]).cache_salt == ""
    body, headers = PLACES[place][1](None)
    assert received(body, {**headers, "x-cache-salt": "7"}).cache_salt == "7"


def test_a_header_equals_the_same_text_in_the_body():
    assert received({"cache_salt": "größe"}, {"x-cache-salt": "größe".encode().decode("latin-1")}).cache_salt == "größe"
    assert refused({}, {"x-cache-salt": "\xff"}).message == "x-cache-salt: it is not UTF-8"


def test_what_else_stands_beside_a_salt_is_left_for_others():
    call = received({"nvext": {"cache_salt": "7", "agent_hints": {"priority": 1}}, "extra_body": {"top_k": 1, "cache_salt": "7"}})
    assert call.cache_salt == "7"
    assert {key: msgspec.json.decode(raw) for key, raw in call.unclaimed.items()} == {
        "nvext": {"agent_hints": {"priority": 1}},
        "extra_body": {"top_k": 1},
    }


@pytest.mark.parametrize("value", [None, 7, "7", [], {}, {"other": 1}])
def test_an_object_without_a_salt_is_left_as_it_is(value):
    call = received({"nvext": value})
    assert {key: msgspec.json.decode(raw) for key, raw in call.unclaimed.items()} == {"nvext": value}


@pytest.mark.parametrize("place", ["sampling_params", "extra_body", "nvext"])
def test_the_body_of_a_relayed_route_may_hold_the_salt_too(place):
    call = make_call(unclaimed={place: msgspec.Raw(b'{"cache_salt": "7"}'), "prompt": msgspec.Raw(b'"hi"')}, relayed=True)
    CacheSalt(Settings()).receive_call(call)
    assert (call.cache_salt, list(call.unclaimed)) == ("7", ["prompt"])


@pytest.mark.parametrize("rest", [b'"x": [1,}', b'"x": ' + b"[" * 100_000 + b"]" * 100_000])
def test_an_object_that_cannot_be_read_is_refused_since_a_salt_may_be_in_it(rest):
    call = make_call(unclaimed={"nvext": msgspec.Raw(b'{"cache_salt": "7", ' + rest + b"}")})
    with pytest.raises(BadRequest, match="nvext: it can't be read") as raised:
        CacheSalt(Settings()).receive_call(call)
    assert raised.value.param == "nvext"


def test_with_require_a_call_without_a_salt_is_refused():
    error = refused(require=True)
    assert (error.status, error.param) == (400, "cache_salt")
    assert "X-Cache-Salt" in error.message
    assert received({"sampling_params": {"cache_salt": "0"}}, require=True).cache_salt == "0"


def test_a_call_of_which_no_kv_comes_needs_no_salt_and_gets_none():
    call = make_call(relayed=True, touches_kv=False)
    CacheSalt(Settings(require=True)).receive_call(call)
    by_version = CacheSalt(Settings(default="weight-version"))
    by_version.identify_call(call)
    assert (call.cache_salt, call.identity) == ("", Identity())
    assert by_version.eligible_workers(call, [make_worker("a", ScriptedLane([]))]) is None


def test_require_and_a_default_exclude_each_other():
    with pytest.raises(SettingsError, match=r"plugins\.cache-salt: .*set one of them"):
        convert_settings({"require": True, "default": "weight-version"}, Settings, source="headrace.toml", path="plugins.cache-salt")


class Identities:
    """Notes the identities that routing works with."""

    def __init__(self):
        self.seen: list[Identity] = []

    @hookimpl
    def eligible_workers(self, call: Call) -> None:
        self.seen.append(call.identity)


async def test_the_salt_is_the_engines_and_the_namespace_of_the_call():
    lane, identities = ScriptedLane([output(7, finish="stop")]), Identities()
    rig = Rig(make_worker("a", lane), plugins=[CacheSalt(Settings()), identities])
    browser = await Browser({**BODY, "sampling_params": {"cache_salt": "7"}}).ask(rig)
    assert (browser.status, lane.requests[0].kv.cache_salt) == (200, "7")
    assert identities.seen == [Identity(namespace="7")]


def version_rig(*versions, lanes=None):
    lanes = lanes or [ScriptedLane([output(7, finish="stop")]) for _ in versions]
    workers = [make_worker(f"w{number}", lane) for number, lane in enumerate(lanes)]
    for worker, version in zip(workers, versions, strict=True):
        worker.policy_version = version
    return Rig(*workers, plugins=[CacheSalt(Settings(default="weight-version"))]), lanes


async def test_by_default_an_unsalted_call_gets_the_policy_version_of_its_worker():
    rig, lanes = version_rig("7", "8")
    for _ in range(2):
        assert (await Browser(BODY).ask(rig)).status == 200
    assert [lane.requests[0].kv.cache_salt for lane in lanes] == ["7", "8"]


async def test_a_call_that_is_tried_elsewhere_gets_the_other_workers_version():
    rig, lanes = version_rig("7", "8", lanes=[ScriptedLane([WorkerLost("gone")]), ScriptedLane([output(7, finish="stop")])])
    assert (await Browser(BODY).ask(rig)).status == 200
    assert [lane.requests[0].kv.cache_salt for lane in lanes] == ["7", "8"]


async def test_the_callers_own_salt_is_never_replaced():
    rig, [lane] = version_rig("8")
    await Browser({**BODY, "cache_salt": "7"}).ask(rig)
    assert lane.requests[0].kv.cache_salt == "7"


async def test_a_worker_that_tells_no_version_gets_no_unsalted_call():
    rig, lanes = version_rig(None, "8", "")
    for _ in range(3):
        assert (await Browser(BODY).ask(rig)).headers["x-headrace-worker"] == "w1"
    assert [len(lane.requests) for lane in lanes] == [0, 3, 0]


async def test_when_no_worker_tells_its_version_only_salted_calls_are_served():
    rig, [lane] = version_rig(None)
    browser = await Browser(BODY).ask(rig)
    assert (browser.status, lane.requests) == (503, [])
    assert "policy version" in browser.json["error"]["message"]
    assert (await Browser({**BODY, "cache_salt": "7"}).ask(rig)).status == 200


async def test_the_version_comes_behind_what_another_plugin_keeps_apart():
    class Tenants:
        @hookimpl
        def identify_call(self, call: Call) -> None:
            call.identity = replace(call.identity, namespace=f"acme.{call.identity.namespace}")

    lane = ScriptedLane([output(7, finish="stop")])
    worker = make_worker("a", lane)
    worker.policy_version = "7"
    await Browser(BODY).ask(Rig(worker, plugins=[Tenants(), CacheSalt(Settings(default="weight-version"))]))
    assert lane.requests[0].kv.cache_salt == "acme.7"


def test_nothing_goes_unsalted_to_a_worker_whose_version_is_not_known():
    call = make_call()
    CacheSalt(Settings(default="weight-version")).identify_call(call)
    with pytest.raises(NoWorker, match="worker a doesn't tell its policy version"):
        call.identity.namespace_on(make_worker("a"))


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=140), unique=True, min_size=2, max_size=4))
@example(["run/7", "run@7", "7"])
def test_versions_become_salts_that_vllm_takes_and_that_differ_as_they_do(versions):
    salts = [salt_of_version(version) for version in versions]
    assert len(set(salts)) == len(versions)
    for salt in salts:
        assert received({"cache_salt": salt}).cache_salt == salt


def test_a_version_that_may_be_a_salt_is_one_and_another_is_its_digest():
    assert salt_of_version("default") == "default"
    assert salt_of_version("run/7") == f"sha256-{sha256(b'run/7').hexdigest()}"
