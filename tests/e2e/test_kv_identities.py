"""What keeps blocks apart beside their tokens, on real engines that publish KV events: adapters and media.

The stand-in tells the same as they do.
"""

import base64
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from plugins.routing_kv.engine_hash import block_hashes, event_hash
from tests import workers
from tests.conformance.plugins.cached import ask_counting
from tests.e2e.publishers import BLOCK, SETTINGS, Engine, ask, fresh, indexed, route, start
from tests.proxy import RunningProxy, headrace, wait_for
from tests.workers import components
from tests.workers.images import IN_PROMPT, OFFSET, TOKENS, prepared
from tests.workers.processes import free_ports
from tests.workers.tiny_vision import VISION_START

pytestmark = pytest.mark.real

ADAPTING = f'{SETTINGS}[plugins.lora]\nallowed_paths = ["/"]\n'


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    if reason := workers.why_not("engine"):
        pytest.skip(f"no engine worker here: {reason}")
    with ExitStack() as stack:
        yield start(stack)


# --- adapters ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two with the same weights: their names and paths alone keep them apart."""
    folder = tmp_path_factory.mktemp("adapters")
    return {name: Path(shutil.copytree(workers.adapter(), folder / name)) for name in ("math", "other")}


@pytest.fixture(scope="module")
def proxy(engine: Engine, adapters: dict[str, Path]) -> Iterator[RunningProxy]:
    with headrace(engine.worker, settings=ADAPTING) as proxy:
        for name, path in adapters.items():
            load(proxy, name, path)
        yield proxy


def load(proxy: RunningProxy, name: str, path: Path, **members: Any) -> None:
    body = {"lora_name": name, "lora_path": str(path), **members}
    httpx.post(f"{proxy.url}/v1/load_lora_adapter", json=body, timeout=120).raise_for_status()


def test_no_adapter_finds_what_the_model_or_another_one_has_of_the_same_tokens(engine, proxy):
    salt = {"cache_salt": "7"}
    identities: list[dict[str, Any]] = [{}, {"model": "math"}, {"model": "other"}, salt, {"model": "math", **salt}]
    # The model itself is the first to have one of the prompts, and the last to be asked about the other.
    calls = [(prompt, identity) for order in (identities, identities[::-1]) for prompt in [fresh(2 * BLOCK + 1)] for identity in order]
    before = indexed(proxy)["w0"]
    for count, (prompt, identity) in enumerate(calls, 1):
        reply, cached = ask_counting(engine.worker, proxy, prompt, **identity)
        assert (route(reply)[1], cached) == ("kv: 0 of 2 blocks", 0)
        wait_for(lambda: indexed(proxy)["w0"] == before + 2 * count)  # noqa: B023 - called in this round only
    # Another headrace believes nothing: it knows from the events alone.
    with headrace(engine.worker, settings=ADAPTING) as another:
        wait_for(lambda: indexed(another)["w0"] == before + 2 * len(calls))
        for prompt, identity in calls:
            reply, cached = ask_counting(engine.worker, another, prompt, **identity)
            assert (route(reply)[1], cached) == ("kv: 2 of 2 blocks", 2 * BLOCK)


def test_an_adapter_that_was_loaded_anew_finds_nothing_of_the_version_before(engine, proxy, adapters):
    prompt = fresh(2 * BLOCK + 1)
    before = indexed(proxy)["w0"]
    load(proxy, "anew", adapters["math"])
    ask(proxy, prompt, model="anew")
    wait_for(lambda: indexed(proxy)["w0"] == before + 2)
    reply, cached = ask_counting(engine.worker, proxy, prompt, model="anew")
    assert (route(reply)[1], cached) == ("kv: 2 of 2 blocks", 2 * BLOCK)
    load(proxy, "anew", adapters["other"], load_inplace=True)
    reply, cached = ask_counting(engine.worker, proxy, prompt, model="anew")
    assert (route(reply)[1], cached) == ("kv: 0 of 2 blocks", 0)


@pytest.mark.parametrize("salt", ["", "7"], ids=["unsalted", "salted"])
@pytest.mark.usefixtures("proxy")
def test_our_hashes_of_an_adapters_blocks_are_the_engines(engine, adapters, salt):
    prompt = fresh(3 * BLOCK + 5)
    engine.generate(prompt, model="math", cache_salt=salt or None)
    ours = block_hashes(prompt, BLOCK, salt=salt, adapter=("math", str(adapters["math"])))
    assert engine.stored(prompt, "math") == [event_hash(digest) for digest in ours]


# --- beside the stand-in -----------------------------------------------------------------------------------------------------------


def test_the_stand_in_publishes_the_same_in_the_same_form(engine):
    prompts = [fresh(2 * BLOCK + 3) for _ in range(3)]

    def told(publisher: Engine) -> list[Any]:
        with httpx.Client(base_url=publisher.worker.http, timeout=120) as client:
            body = {"lora_name": "same", "lora_path": str(workers.adapter())}
            client.post("/v1/load_lora_adapter", json=body).raise_for_status()
            client.post("/reset_prefix_cache").raise_for_status()
        publisher.generate(prompts[0])
        publisher.generate([*prompts[0], *range(40, 40 + 2 * BLOCK)])
        publisher.generate(prompts[1], cache_salt="7")
        publisher.generate(prompts[2], cache_salt="7", model="same")
        return wait_for(lambda: (found := since_the_last_reset(publisher.payloads()))[4:] and found)

    with ExitStack() as stack:
        assert told(publishing_stand_in(stack)) == told(engine)


def publishing_stand_in(stack: ExitStack) -> Engine:
    events, replay = free_ports(2)
    config = {"enable_kv_cache_events": True, "endpoint": f"tcp://*:{events}", "replay_endpoint": f"tcp://*:{replay}", "topic": "kv"}
    worker = stack.enter_context(workers.stand_in(block_size=BLOCK, kv_events_config=json.dumps(config)))
    return Engine(worker, f"tcp://127.0.0.1:{events}", f"tcp://127.0.0.1:{replay}")


def since_the_last_reset(payloads: Sequence[bytes]) -> list[Any]:
    """The events from it on, undecoded but for MessagePack, with hashes and adapters numbered in the order of their coming."""
    events: list[dict[str, Any]] = []
    for payload in payloads:
        timestamp, batch, rank = msgspec.msgpack.decode(payload)
        assert (type(timestamp), rank) == (float, 0)
        events += batch
    reset = max(index for index, event in enumerate(events) if event["type"] == "AllBlocksCleared")
    numbers: dict[Any, int] = {}
    for event in events[reset + 1 :]:
        event["block_hashes"] = [numbers.setdefault(block, len(numbers)) for block in event["block_hashes"]]
        parent, adapter = event.get("parent_block_hash"), event.get("lora_id")
        event["parent_block_hash"] = parent and numbers[parent]
        event["lora_id"] = adapter and isinstance(adapter, int)
    return events[reset:]


# --- media -------------------------------------------------------------------------------------------------------------------------

PROMPT = [*range(40, 30 + BLOCK), *IN_PROMPT, *range(100, 112)]


@pytest.fixture(scope="module")
def seeing() -> Iterator[Engine]:
    if reason := workers.why_no_variants():
        pytest.skip(f"no engine with a model that sees here: {reason}")
    path = {"PYTHONPATH": str(components.vision_packages())}
    with ExitStack() as stack:
        yield start(stack, model=components.variant_models() / "vision", lora=False, environment=path)


def features(seed: int) -> dict[str, Any]:
    return {
        "mm_hashes": {"image": [f"picture-{seed}"]},
        "mm_placeholders": {"image": [{"offset": PROMPT.index(VISION_START) + OFFSET, "length": TOKENS}]},
        "kwargs_data": {"image": [base64.b64encode(prepared(seed)).decode()]},
    }


def test_equal_placeholders_with_another_image_are_not_found(seeing):
    kinds: list[dict[str, Any]] = [{"features": features(1)}, {"features": features(2)}, {}]
    with headrace(seeing.worker, settings=SETTINGS) as proxy:
        for blocks, members in enumerate(kinds):
            assert route(ask(proxy, PROMPT, **members))[1] == "kv: 0 of 1 blocks"
            wait_for(lambda: indexed(proxy)["w0"] == blocks + 1)  # noqa: B023
    # Another headrace believes nothing: it knows from the events alone.
    with headrace(seeing.worker, settings=SETTINGS) as proxy:
        wait_for(lambda: indexed(proxy)["w0"] == 3)
        for members in kinds:
            assert route(ask(proxy, PROMPT, **members))[1] == "kv: 1 of 1 blocks"
        assert route(ask(proxy, PROMPT, features=features(3)))[1] == "kv: 0 of 1 blocks"
