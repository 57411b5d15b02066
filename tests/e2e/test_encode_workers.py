"""A real engine that only looks at pictures, and another one that goes on with what the first has seen, over a folder that they share."""

import hashlib
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests import workers
from tests.e2e.pictures import BLUE_PNG, PROMPT, RAW_PROMPT, RED_PNG, features, parts, post, tokens
from tests.proxy import RunningProxy, headrace, wait_for
from tests.workers import RunningWorker, components
from tests.workers.images import prepared

pytestmark = pytest.mark.real


class Pair(NamedTuple):
    proxy: RunningProxy
    encode: RunningWorker
    whole: RunningWorker
    shared: Path

    def seen(self) -> set[str]:
        """The names of the pictures of which something lies in the folder."""
        return {file.parent.name for file in self.shared.glob("*/encoder_cache.safetensors")}

    def forget(self) -> None:
        """Let nobody have seen anything."""
        for picture in self.shared.iterdir():
            shutil.rmtree(picture)
        for worker in (self.encode, self.whole):
            httpx.post(f"{worker.http}/reset_encoder_cache", timeout=60).raise_for_status()


@pytest.fixture(scope="module")
def engines() -> Iterator[Pair]:
    if reason := workers.why_no_variants():
        pytest.skip(f"no engine with a model that sees here: {reason}")
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        shared = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-encoder-cache-")))
        # Both at once: each takes half a minute and more to start.
        starting = [pool.submit(stack.enter_context, workers.encoding_engine(role, shared)) for role in ("ec_producer", "ec_consumer")]
        encode, whole = (worker.result() for worker in starting)
        settings = '[plugins.weights-filesystem]\nallowed_paths = ["/"]\nmarkers = []\n'
        proxy = stack.enter_context(headrace(encode, whole, roles=("encode", "aggregated"), settings=settings))
        yield Pair(proxy, encode, whole, shared)


@pytest.fixture
def pair(engines: Pair) -> Pair:
    """Both, with nothing seen."""
    engines.forget()
    return engines


def name(content: bytes) -> str:
    """Under which headrace names a picture to the workers."""
    return hashlib.sha256(b"image\0" + content).hexdigest()


PREPARED: dict[str, Any] = {"token_ids": PROMPT, "features": features(1)}
AS_IT_IS: dict[str, Any] = {"token_ids": RAW_PROMPT, "content_parts": parts(RED_PNG)}


@pytest.mark.parametrize(("sent", "content"), [(PREPARED, prepared(1)), (AS_IT_IS, RED_PNG)], ids=["prepared", "as it is"])
def test_the_output_is_that_of_one_worker_and_another_one_has_seen_the_picture(pair, sent, content, request):
    salt = request.node.callspec.id
    reply = post(pair.proxy.url, **sent, cache_salt=salt)
    assert reply.headers["x-headrace-route"] == "encode=w0 (round-robin), aggregated=w1 (round-robin)"
    assert pair.seen() == {name(content)}

    pair.forget()
    with headrace(pair.whole) as alone:
        assert tokens(post(alone.url, **sent, cache_salt=f"{salt} alone")) == tokens(reply)
    assert pair.seen() == set(), "it writes nothing, so that what lay there was the other one's"
    wait_for(lambda: not pair.encode.running_requests() + pair.whole.running_requests() + pair.proxy.in_flight())


def test_the_worker_takes_what_was_seen_elsewhere_for_what_it_sees(pair):
    def ask(picture: bytes, salt: str) -> list[int]:
        return tokens(post(pair.proxy.url, token_ids=RAW_PROMPT, content_parts=parts(picture), cache_salt=salt))

    red, blue = ask(RED_PNG, "red"), ask(BLUE_PNG, "blue")
    assert red != blue
    pair.forget()
    ask(RED_PNG, "again")
    shutil.copytree(pair.shared / name(RED_PNG), pair.shared / name(BLUE_PNG))
    assert ask(BLUE_PNG, "disguised") == red


def test_a_streamed_call_has_its_picture_seen_elsewhere_too(pair):
    text = post(pair.proxy.url, features=features(2), cache_salt="streamed", stream=True).text
    assert text.endswith("data: [DONE]\n\n")
    assert "error" not in text
    assert pair.seen() == {name(prepared(2))}


def test_a_call_without_a_picture_goes_to_the_worker_alone(pair):
    reply = post(pair.proxy.url, token_ids=[*range(40, 60)])
    assert len(tokens(reply)) > 0
    assert reply.headers["x-headrace-route"] == "round-robin"


def test_an_encode_worker_is_paused_and_updated_with_the_others(pair):
    before = tokens(post(pair.proxy.url, **PREPARED, cache_salt="before"))
    update = {"version": "7", "transport": "filesystem", "path": str(components.variant_models() / "vision"), "wait": True}
    done = httpx.post(f"{pair.proxy.url}/fleet/updates", json=update, timeout=120).json()
    assert {worker: one["status"] for worker, one in done["workers"].items()} == {"w0": "done", "w1": "done"}
    reply = post(pair.proxy.url, **PREPARED, cache_salt="after")
    assert reply.headers["x-headrace-route"].startswith("encode=w0")
    assert (tokens(reply), reply.json()["choices"][0]["weight_versions"][0]["version"]) == (before, "7"), "they were the same weights"
