"""Prepared features on the path: the wire has each item under a name bound to its content, or the client an error that names the field."""

import base64
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as changed
from trio.testing import wait_all_tasks_blocked

from core import OVER_GRPC, BadRequest, Call, hookimpl
from core.errors import CallError
from core.fleet.worker import Worker
from core.northbound.body import parse_call
from core.wire.generated.inference_pb2 import GenerateRequest, MediaItem
from core.wire.needs import RUST_HTTP_CAN
from plugins.cache_salt import CacheSalt
from plugins.cache_salt import Settings as SaltSettings
from plugins.mm_features import MAX_BYTES, MultimodalFeatures, Settings
from plugins.mm_features.features import digest_of
from tests.unit.core.lanes import Script, ScriptedLane, output
from tests.unit.core.rig import Browser, Rig, make_worker
from tests.unit.plugins.mm_features.media import PROMPT, body, encoded, features, kwargs, one


def seeing(name: str, *lanes: ScriptedLane) -> Worker:
    worker = make_worker(name, *lanes)
    assert worker.info
    worker.info = changed(worker.info, supports_multimodal=True)
    return worker


class Bed:
    """A worker that sees, and everything before it."""

    def __init__(self, settings_: Settings | None = None, *more: object, scripts: Sequence[Script] = ()) -> None:
        self.lane = ScriptedLane(*scripts or ([output(7, finish="stop", prompt_token_ids=PROMPT)],))
        plugins = [*more, MultimodalFeatures(settings_ or Settings())]
        self.rig = Rig(seeing("a", self.lane), plugins=plugins)

    async def ask(self, **members: Any) -> Browser:
        return await Browser(body(**members)).ask(self.rig)

    async def refusal(self, **members: Any) -> tuple[int, str, str]:
        browser = await self.ask(**members)
        assert not self.lane.requests
        error = browser.json["error"]
        return browser.status, error["param"], error["message"]

    def identifiers(self) -> list[str]:
        return [item.features.identifier for request in self.lane.requests for item in request.media]


# --- what reaches the worker -----------------------------------------------------------------------------------------------------


async def test_an_item_reaches_the_worker_as_it_is_under_the_name_of_its_content():
    bed = Bed()
    assert (await bed.ask(features=one())).status == 200
    [item] = bed.lane.requests[0].media
    assert (item.modality, item.features.kwargs, item.features.offset, item.features.length) == (MediaItem.IMAGE, kwargs(), 2, 4)
    assert item.features.identifier == item.features.mm_hash == digest_of("image", kwargs())
    assert not item.features.is_embed


async def test_items_of_every_modality_go_in_the_order_of_the_prompt():
    bed = Bed()
    images, sound = features(("i0", 9, 2, kwargs(1)), ("i1", 1, 2, kwargs(2))), features(("s", 5, 3, kwargs(3)), modality="audio")
    await bed.ask(features={key: images[key] | sound[key] for key in images})
    media = bed.lane.requests[0].media
    assert [(item.modality, item.features.offset) for item in media] == [(MediaItem.IMAGE, 1), (MediaItem.AUDIO, 5), (MediaItem.IMAGE, 9)]
    assert [item.features.kwargs for item in media] == [kwargs(2), kwargs(3), kwargs(1)]


async def test_positions_without_an_embedding_are_passed_on():
    bed = Bed()
    wanted = one()
    wanted["mm_placeholders"]["image"][0]["is_embed"] = [True, False, True, True]
    await bed.ask(features=wanted)
    assert list(bed.lane.requests[0].media[0].features.is_embed) == [True, False, True, True]


async def test_every_one_of_n_outputs_sees_the_media():
    bed = Bed()
    await bed.ask(features=one(), sampling_params={"n": 3})
    assert [len(request.media) for request in bed.lane.requests] == [1, 1, 1]


async def test_metadata_are_taken_and_not_read():
    bed = Bed()
    assert (await bed.ask(features=one() | {"mm_metadata": {"image": [{"anything": [1]}]}})).status == 200


async def test_the_reply_says_where_they_are_when_it_has_the_prompt():
    browser = await Bed().ask(features=one(), return_token_ids=True)
    assert browser.json["mm_placeholders"] == {"image": [{"offset": 2, "length": 4}]}
    assert browser.json["prompt_token_ids"] == PROMPT


async def test_a_stream_says_it_in_its_first_chunk():
    browser = await Bed().ask(features=one(), return_token_ids=True, stream=True)
    assert browser.events[0]["mm_placeholders"] == {"image": [{"offset": 2, "length": 4}]}


async def test_null_is_the_same_as_nothing():
    bed = Bed()
    assert (await bed.ask(features=None, content_parts=None)).status == 200
    assert not bed.lane.requests[0].media


async def test_large_items_are_read_in_a_thread_with_the_same_result():
    bed = Bed()
    large = kwargs(5, patches=20_000)
    assert (await bed.ask(features=one(large))).status == 200
    assert bed.lane.requests[0].media[0].features.kwargs == large
    bed = Bed()
    wrong = large[:-30] + b"\xc1" * 30
    assert (await bed.refusal(features=one(wrong)))[1] == "features.kwargs_data.image[0]"


async def test_a_slash_may_be_escaped():
    bed = Bed()
    data = next(kwargs(fill) for fill in range(256) if "/" in encoded(kwargs(fill)))
    wire = msgspec.json.encode(body(features=one(data))).replace(b"/", b"\\/")
    assert (await Browser(wire).ask(bed.rig)).status == 200
    assert bed.lane.requests[0].media[0].features.kwargs == data


# --- identity --------------------------------------------------------------------------------------------------------------------


class Seen:
    def __init__(self) -> None:
        self.media: list[tuple[str, ...]] = []
        self.ranges: list[tuple[tuple[int, int], ...]] = []

    @hookimpl(trylast=True)
    def identify_call(self, call: Call) -> None:
        self.media.append(call.identity.media)
        self.ranges.append(call.identity.media_ranges)


async def test_equal_content_has_one_identity_and_different_content_another_whatever_the_client_calls_it():
    seen = Seen()
    bed = Bed(None, seen)
    for name, fill in (("a", 1), ("b", 1), ("c", 2)):
        await bed.ask(features=one(kwargs(fill), name=name))
    first, second, third = bed.identifiers()
    assert first == second != third
    assert seen.media == [(first,), (second,), (third,)]


async def test_the_identity_says_where_in_the_prompt_the_media_are():
    seen = Seen()
    bed = Bed(None, seen)
    await bed.ask(features=features(("b", 4, 1, kwargs(2)), ("a", 1, 3, kwargs(1))))
    assert seen.ranges == [((1, 3), (4, 1))]


async def test_the_same_bytes_as_another_modality_are_another_medium():
    bed = Bed()
    await bed.ask(features=features(("h", 2, 4, kwargs())))
    await bed.ask(features=features(("h", 2, 4, kwargs()), modality="video"))
    assert len(set(bed.identifiers())) == 2


class Adapter:
    @hookimpl
    def receive_call(self, call: Call) -> None:
        call.adapter = call.headers.get("x-adapter", "")


@pytest.mark.parametrize(("tower", "names"), [("frozen", 1), ("adapter", 2), ("trained", 4)])
async def test_the_identity_is_bound_to_what_changes_the_tower(tower, names):
    bed = Bed(Settings(tower=tower), Adapter())
    for adapter in ("", "math"):
        for salt in ("7", "8"):
            await Browser(body(features=one(), cache_salt=salt), {"x-adapter": adapter}).ask(bed.rig)
    assert len(set(bed.identifiers())) == names


async def test_a_hash_that_changes_its_meaning_is_refused():
    bed = Bed()
    await bed.ask(features=one(kwargs(1)))
    browser = await bed.ask(features=one(kwargs(2)))
    assert (browser.status, browser.json["error"]["param"]) == (400, "features.mm_hashes.image[0]")
    assert (await bed.ask(features=one(kwargs(1)))).status == 200


async def test_a_hash_that_means_two_things_in_one_call_is_refused_and_neither_is_remembered():
    bed = Bed()
    twice = features(("h", 2, 4, kwargs(1)), ("h", 8, 4, kwargs(2)))
    assert (await bed.refusal(features=twice))[:2] == (400, "features.mm_hashes.image[1]")
    assert (await bed.ask(features=one(kwargs(2)))).status == 200


async def test_a_trained_tower_binds_names_to_the_policy_version_where_that_is_the_salt():
    bed = Bed(Settings(tower="trained"), CacheSalt(SaltSettings(default="weight-version")))
    [worker] = bed.rig.workers
    for version in ("7", "8"):
        worker.policy_version = version
        assert (await bed.ask(features=one())).status == 200
    assert bed.identifiers() == [f"{version}/{digest_of('image', kwargs())}" for version in ("7", "8")]
    assert [request.kv.cache_salt for request in bed.lane.requests] == ["7", "8"]


class Refusing:
    """Refuses calls that say so, before they are placed."""

    @hookimpl
    def eligible_workers(self, call: Call) -> None:
        if "x-refuse" in call.headers:
            raise BadRequest("refused")


@pytest.mark.parametrize("store_mib", [0, 1])
async def test_a_call_that_is_refused_says_nothing_of_what_a_hash_stands_for(store_mib):
    bed = Bed(Settings(store_mib=store_mib), Refusing())
    assert (await Browser(body(features=one(kwargs(1))), {"x-refuse": "1"}).ask(bed.rig)).status == 400
    assert (await bed.ask(features=one(kwargs(2)))).status == 200


async def test_a_call_that_its_worker_refuses_says_nothing_of_what_a_hash_stands_for():
    bed = Bed(None, scripts=[[CallError(400, "it can't be read")], [output(7, finish="stop")]])
    assert (await bed.ask(features=one(kwargs(1)))).status == 400
    assert (await bed.ask(features=one(kwargs(2)))).status == 200


async def test_of_two_calls_at_once_that_disagree_the_first_to_be_answered_says_what_the_hash_stands_for(nursery):
    late = trio.Event()
    bed = Bed(None, scripts=[[late, output(7, finish="stop")], [output(7, finish="stop")]])
    first = Browser(body(features=one(kwargs(1))))
    nursery.start_soon(first.ask, bed.rig)
    await wait_all_tasks_blocked()
    assert (await bed.ask(features=one(kwargs(2)))).status == 200
    late.set()
    await wait_all_tasks_blocked()
    assert first.status == 200
    assert [(await bed.ask(features=one(kwargs(fill)))).status for fill in (1, 2)] == [400, 200]


async def test_a_stream_says_it_with_its_end():
    bed = Bed()
    assert (await bed.ask(features=one(kwargs(1)), stream=True)).status == 200
    assert (await bed.ask(features=one(kwargs(2)))).status == 400


# --- items that are only their hash ----------------------------------------------------------------------------------------------


async def test_an_item_without_data_is_refused_unless_a_store_is_set_up():
    status, param, message = await Bed().refusal(features=features(("h", 2, 4, None)))
    assert (status, param) == (400, "features.kwargs_data.image[0]")
    assert "store_mib" in message


@pytest.mark.parametrize("kept", [{"kwargs_data": {"image": [None]}}, {"kwargs_data": None}])
async def test_with_a_store_a_later_turn_may_send_the_hash_alone(kept):
    bed = Bed(Settings(store_mib=1))
    await bed.ask(features=one())
    assert (await bed.ask(features=one() | kept)).status == 200
    first, second = (request.media[0] for request in bed.lane.requests)
    assert first == second


async def test_a_hash_that_is_not_stored_is_refused():
    status, param, message = await Bed(Settings(store_mib=1)).refusal(features=features(("h", 2, 4, None)))
    assert (status, param) == (400, "features.kwargs_data.image[0]")
    assert "send it" in message


# --- refused ---------------------------------------------------------------------------------------------------------------------

TWO = features(("a", 2, 4, kwargs(1)), ("b", 8, 4, kwargs(2)))


def edited(path: str, value: Any, base: dict[str, Any] = TWO) -> dict[str, Any]:
    """A copy with one member replaced; `path` is like `mm_hashes.image.0`."""
    copy: Any = msgspec.json.decode(msgspec.json.encode(base))
    *way, last = path.split(".")
    place = copy
    for step in way:
        place = place[int(step) if isinstance(place, list) else step]
    place[int(last) if isinstance(place, list) else last] = value
    return copy


@pytest.mark.parametrize(
    ("wanted", "param"),
    [
        ({}, "features.mm_hashes"),
        ([], "features"),
        ("x", "features"),
        (edited("more", 1), "features.more"),
        (edited("mm_hashes", {}), "features"),
        (edited("mm_hashes", {"image": []}), "features"),
        (edited("mm_hashes.image.0", ""), "features.mm_hashes[...][0]"),
        (edited("mm_hashes.image.0", 7), "features.mm_hashes[...][0]"),
        (edited("mm_hashes", {"smell": ["a", "b"]}), "features.mm_hashes"),
        (edited("mm_hashes.image", ["a"]), "features.mm_placeholders"),
        (edited("mm_hashes.audio", ["a"]), "features.mm_placeholders"),
        (edited("kwargs_data.image", ["aaaa"]), "features.kwargs_data"),
        (edited("kwargs_data", {}), "features.kwargs_data"),
        (edited("mm_metadata", {"image": [1]}), "features.mm_metadata"),
        (edited("mm_placeholders.image.1.offset", 5), "features.mm_placeholders.image[1]"),
        (edited("mm_placeholders.image.1.offset", 2), "features.mm_placeholders.image[1]"),
        (edited("mm_placeholders.image.1.offset", 17), "features.mm_placeholders.image[1]"),
        (edited("mm_placeholders.image.1.offset", 2**62 - 1), "features.mm_placeholders.image[1]"),
        (edited("mm_placeholders.image.1.offset", -1), "features.mm_placeholders[...][1].offset"),
        (edited("mm_placeholders.image.1.length", 0), "features.mm_placeholders[...][1].length"),
        (edited("mm_placeholders.image.1.is_embed", [True]), "features.mm_placeholders.image[1].is_embed"),
        (edited("mm_placeholders.image.1.is_embed", [1, 1, 1, 1]), "features.mm_placeholders[...][1].is_embed[0]"),
        (edited("kwargs_data.image.1", ""), "features.kwargs_data.image[1]"),
        (edited("kwargs_data.image.1", "a"), "features.kwargs_data.image[1]"),
        (edited("kwargs_data.image.1", "no base64!"), "features.kwargs_data.image[1]"),
        (edited("kwargs_data.image.1", 5), "features.kwargs_data.image[1]"),
        (edited("kwargs_data.image.1", encoded(b"\xc1")), "features.kwargs_data.image[1]"),
        (edited("kwargs_data.image.1", encoded(kwargs() + b"\x00")), "features.kwargs_data.image[1]"),
    ],
)
async def test_what_is_wrong_is_refused_with_its_path(wanted, param):
    status, found, message = await Bed().refusal(features=wanted)
    assert (status, found) == (400, param)
    assert message.startswith(param)


async def test_more_than_sixteen_mebibytes_are_refused():
    large = kwargs(1, patches=MAX_BYTES // 16)
    assert (await Bed().refusal(features=one(large)))[:2] == (413, "features")


async def test_prepared_and_raw_media_exclude_each_other():
    assert (await Bed().refusal(features=one(), content_parts=[]))[:2] == (400, "features")


async def test_an_encoder_hand_over_would_name_the_items_otherwise():
    assert (await Bed().refusal(features=one(), ec_transfer_params={"ec_items": []}))[:2] == (400, "ec_transfer_params")


# --- which worker ----------------------------------------------------------------------------------------------------------------


async def test_only_workers_whose_model_sees_are_eligible():
    lanes = [ScriptedLane([output(7, finish="stop")]) for _ in range(3)]
    rig = Rig(make_worker("blind", lanes[0]), seeing("a", lanes[1]), seeing("b", lanes[2]), plugins=[MultimodalFeatures(Settings())])
    for _ in range(4):
        await Browser(body(features=one())).ask(rig)
    assert [len(lane.requests) for lane in lanes] == [0, 2, 2]


async def test_without_one_the_call_is_refused():
    rig = Rig(make_worker("blind", ScriptedLane()), plugins=[MultimodalFeatures(Settings())])
    browser = await Browser(body(features=one())).ask(rig)
    assert (browser.status, browser.json["error"]["param"]) == (400, "features")
    assert "no worker that is ready has a model that takes media" in browser.json["error"]["message"]


async def test_over_http_features_never_go():
    rig = Rig(seeing("a", ScriptedLane(wire="http", can=RUST_HTTP_CAN)), plugins=[MultimodalFeatures(Settings())])
    browser = await Browser(body(features=one())).ask(rig)
    error = browser.json["error"]
    assert (browser.status, error["message"], error["param"]) == (400, "no worker can serve features (needs grpc)", "features")


# --- whatever comes --------------------------------------------------------------------------------------------------------------

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4), max_leaves=12
)
numbers = st.integers(-1, 25) | st.integers() | anything
datas = st.sampled_from([encoded(kwargs(1)), encoded(kwargs(2)), encoded(b"\x81"), None]) | st.binary().map(encoded) | anything
ranges = st.fixed_dictionaries(
    {"offset": numbers, "length": numbers}, optional={"is_embed": st.lists(st.booleans(), max_size=5) | anything}
)


def by_modality(entries: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keys = st.sampled_from(["image", "video", "audio", "other"])
    return st.dictionaries(keys, st.lists(entries, max_size=3) | anything, max_size=2) | anything


fuzzed = st.fixed_dictionaries(
    {"mm_hashes": by_modality(st.sampled_from(["a", "b", ""]) | anything), "mm_placeholders": by_modality(ranges)},
    optional={"kwargs_data": by_modality(datas), "mm_metadata": by_modality(anything), "x": anything},
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(st.sampled_from(["features", "content_parts"]), fuzzed | anything, st.sampled_from([0, 1]))
def test_whatever_a_client_sends_is_taken_or_refused_with_a_4xx(key, value, store):
    plugin = MultimodalFeatures(Settings(store_mib=store, hosts=("a.example",)))
    call = parse_call(msgspec.json.encode(body(**{key: value})), {})
    assert (refused := refusal_of(plugin, call)) is None or 400 <= refused.status < 500


def refusal_of(plugin: MultimodalFeatures, call: Call) -> CallError | None:
    try:
        plugin.receive_call(call)
        plugin.prepare_call(call)
        plugin.identify_call(call)
        plugin.lower_call(call, make_worker("a"), GenerateRequest() if OVER_GRPC in call.needs else {})
    except CallError as error:
        return error
    return None


@given(st.integers(1, 3), st.data())
def test_whatever_is_right_is_taken(count, data):
    ends = sorted(data.draw(st.lists(st.integers(0, 20), min_size=2 * count, max_size=2 * count, unique=True)))
    items = [(str(i), ends[2 * i], ends[2 * i + 1] - ends[2 * i], kwargs(i)) for i in range(count)]
    call = parse_call(msgspec.json.encode(body(features=features(*data.draw(st.permutations(items))))), {})
    plugin = MultimodalFeatures(Settings())
    plugin.receive_call(call)
    plugin.prepare_call(call)
    plugin.identify_call(call)
    assert call.identity.media == tuple(digest_of("image", kwargs(i)) for i in range(count))


# --- raw media -------------------------------------------------------------------------------------------------------------------

RED, BLUE = ("data:image/png;base64," + base64.b64encode(name).decode() for name in (b"red", b"blue"))


class RawBed:
    """A worker that takes raw media over HTTP; it tells of no gRPC, as one without it."""

    def __init__(self, settings_: Settings | None = None, **told: Any) -> None:
        told = {"mm_placeholders": {"image": [{"offset": 3, "length": 4}]}, "prompt_token_ids": [1, 2, 2, 2, 2]} | told
        self.lane = HttpLane([output(7, finish="stop", **told)], wire="http", can=RUST_HTTP_CAN)
        self.rig = Rig(make_worker("a", self.lane), plugins=[MultimodalFeatures(settings_ or Settings())])

    async def ask(self, *parts: Any, **members: Any) -> Browser:
        return await self.ask_for(content_parts=list(parts), **members)

    async def ask_for(self, **members: Any) -> Browser:
        return await Browser(body(**members)).ask(self.rig)


class HttpLane(ScriptedLane):
    """A lane whose requests are JSON bodies."""

    def lower(self, call: Call, index: int) -> Any:
        return {"token_ids": call.token_ids, "return_token_ids": call.return_token_ids}


def part(url: str, type_: str = "image_url", **more: Any) -> dict[str, Any]:
    return {"type": type_, "url": url, **more}


async def test_raw_media_go_over_http_under_the_name_of_their_content():
    bed = RawBed()
    browser = await bed.ask(part(RED), part(BLUE, uuid="mine"))
    request: Any = bed.lane.requests[0]
    assert request["content_parts"] == [part(RED, uuid=digest_of("image", b"red")), part(BLUE, uuid=digest_of("image", b"blue"))]
    assert request["return_token_ids"]
    assert browser.json["mm_placeholders"] == {"image": [{"offset": 3, "length": 4}]}
    assert browser.json["prompt_token_ids"] == [1, 2, 2, 2, 2]


async def test_an_answer_as_if_there_had_been_text_only_is_an_error():
    assert (await RawBed(mm_placeholders=None).ask(part(RED))).status == 502


async def test_a_name_that_changes_its_meaning_is_refused():
    bed = RawBed()
    await bed.ask(part(RED, uuid="u"))
    browser = await bed.ask(part(BLUE, uuid="u"))
    assert (browser.status, browser.json["error"]["param"]) == (400, "content_parts[0].uuid")


@pytest.mark.parametrize(
    ("members", "param", "allowed"),
    [
        ({"features": edited("mm_hashes", {"thermal": ["a"]})}, "features.mm_hashes", "'audio', 'image', 'video'"),
        ({"features": edited("more", 1)}, "features.more", "known are kwargs_data, mm_hashes, mm_metadata, mm_placeholders"),
        ({"content_parts": [{"type": "text", "url": "x"}]}, "content_parts[0].type", "'audio_url', 'image_url', 'video_url'"),
        ({"content_parts": [part(RED) | {"detail": "low"}]}, "content_parts[0].detail", "known are type, url, uuid"),
    ],
)
async def test_a_refusal_says_what_is_allowed(members, param, allowed):
    browser = await RawBed().ask_for(**members)
    assert (browser.status, browser.json["error"]["param"]) == (400, param)
    assert allowed in browser.json["error"]["message"]


async def test_an_address_on_a_named_host_is_the_workers_to_fetch():
    bed = RawBed(Settings(hosts=("Images.example",)))
    url = "https://images.example:8443/a.png?x=1&y=%20"
    assert (await bed.ask(part(url))).status == 200
    request: Any = bed.lane.requests[0]
    assert request["content_parts"] == [part(url)]


@pytest.mark.parametrize(
    "url",
    [
        "https://other.example/a.png",
        "https://images.example.other.example/",
        "https://images.example@other.example/",
        "https://other.example\\@images.example/",
        "https:\\\\images.example/",
        "https://images.example\t/",
        "//images.example/",
        "ftp://images.example/",
        "file:///etc/passwd",
        "http://127.0.0.1/",
        "data:image/png,red",
        "data:image/png;base64,x",
        "data:image/png;base64,AAAA\n",
        "",
    ],
)
async def test_another_address_is_refused(url):
    bed = RawBed(Settings(hosts=("images.example",)))
    browser = await bed.ask(part(RED), part(url))
    assert (browser.status, browser.json["error"]["param"]) == (400, "content_parts[1].url")
    assert not bed.lane.requests


@pytest.mark.parametrize(
    "parts",
    [[], [1], [{"type": "text", "url": RED}], [{"type": "image_url"}], [part(RED, more=1)], [part(RED, uuid="")], [part(RED, uuid=5)]],
)
async def test_parts_of_another_form_are_refused(parts):
    browser = await RawBed().ask(*parts)
    assert (browser.status, browser.json["error"]["param"][:13]) == (400, "content_parts")


async def test_the_name_of_an_address_cannot_be_checked():
    browser = await RawBed(Settings(hosts=("images.example",))).ask(part("https://images.example/a", uuid="u"))
    assert (browser.status, browser.json["error"]["param"]) == (400, "content_parts[0].uuid")


async def test_an_address_cannot_be_bound_to_an_adapter():
    bed = RawBed(Settings(hosts=("images.example",), tower="trained"))
    browser = await bed.ask(part("https://images.example/a"))
    assert (browser.status, browser.json["error"]["param"]) == (400, "content_parts[0].url")


def test_calls_without_media_are_not_touched():
    plugin = MultimodalFeatures(Settings())
    call = parse_call(msgspec.json.encode(body()), {})
    plugin.receive_call(call)
    assert plugin.prepare_call(call) is None
    plugin.identify_call(call)
    assert (call.notes, call.needs, call.identity.media) == ({}, set(), ())
    assert plugin.eligible_workers(call, ()) is None
