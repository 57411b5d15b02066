"""Pictures for a real model that sees: what it answers through headrace is what it answers directly, and caches are shared by content."""

import time
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest

from core.wire.generated import inference_pb2 as pb
from tests import workers
from tests.e2e.pictures import BLOCK, BLUE_PNG, LENGTH, PLACE, PROMPT, RAW_PROMPT, RED_PNG, features, parts, post, tokens
from tests.proxy import RunningProxy, headrace
from tests.workers import RunningWorker
from tests.workers.images import TOKENS, prepared

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def worker() -> Iterator[RunningWorker]:
    if reason := workers.why_no_variants():
        pytest.skip(f"no engine with a model that sees here: {reason}")
    with workers.seeing_engine() as worker:
        yield worker


@pytest.fixture(scope="module")
def proxy(worker: RunningWorker) -> Iterator[RunningProxy]:
    with headrace(worker, settings="[plugins.mm-features]\nstore_mib = 16\n") as proxy:
        yield proxy


@pytest.fixture
def salt(request: pytest.FixtureRequest) -> str:
    """Keeps one test's cached blocks from another's."""
    return request.node.name[:128].replace("/", "-")


def directly(worker: RunningWorker, seed: int, salt: str) -> list[int]:
    """The output for a prepared picture, asked over gRPC as headrace does."""
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=PROMPT),
        temperature=0.0,
        stopping=pb.StoppingCriteria(max_new_tokens=LENGTH, ignore_eos=True),
        response=pb.ResponseOptions(output_token_ids=True),
        kv=pb.KVCacheParameters(cache_salt=salt),
    )
    picture = pb.PreprocessedMediaFeatures(
        kwargs=prepared(seed), identifier=f"direct-{seed}", offset=PLACE["offset"], length=PLACE["length"]
    )
    request.media.append(pb.MediaItem(modality=pb.MediaItem.IMAGE, features=picture))
    with grpc.insecure_channel(worker.grpc) as channel:
        generate = channel.unary_unary(
            "/vllm.Inference/Generate",
            request_serializer=pb.GenerateRequest.SerializeToString,
            response_deserializer=pb.GenerateResponse.FromString,
        )
        return list(generate(request, timeout=60).outputs.token_ids)


class Hits:
    """How many tokens calls found in the engine's prefix cache, by its own count."""

    def __init__(self, worker: RunningWorker) -> None:
        self._worker = worker
        self._queries, self._hits = self._read()

    def _read(self) -> tuple[int, int]:
        lines = httpx.get(f"{self._worker.http}/metrics").text.splitlines()

        def total(name: str) -> int:
            return sum(int(float(line.split()[-1])) for line in lines if line.startswith(f"vllm:prefix_cache_{name}_total"))

        return total("queries"), total("hits")

    def since(self) -> int:
        """Since the last look; waits until the engine has counted a call."""
        deadline = time.monotonic() + 10
        while (now := self._read())[0] == self._queries:
            assert time.monotonic() < deadline, "the engine has counted no call"
            time.sleep(0.02)
        found = now[1] - self._hits
        self._queries, self._hits = now
        return found


def test_two_pictures_in_one_layout_give_two_outputs_and_each_is_what_it_is_directly(worker, proxy, salt):
    first, second = (tokens(post(proxy.url, features=features(seed), cache_salt=salt)) for seed in (1, 2))
    assert first != second
    assert (first, second) == (directly(worker, 1, f"{salt}-d"), directly(worker, 2, f"{salt}-d"))


def test_the_same_picture_shares_its_prefix_and_another_does_not(worker, proxy, salt):
    hits = Hits(worker)
    found = []
    for seed, name in ((1, "a"), (1, "b"), (2, "c"), (1, "d"), (2, "e")):  # the client's names don't matter
        post(proxy.url, features=features(seed, f"{salt}-{name}"), cache_salt=salt).raise_for_status()
        found.append(hits.since())
    assert found == [0, BLOCK, 0, BLOCK, BLOCK]


def test_a_later_turn_may_send_the_hash_alone(proxy, salt):
    whole = tokens(post(proxy.url, features=features(3), cache_salt=salt))
    assert tokens(post(proxy.url, features=features(3, data=False), cache_salt=salt)) == whole


def test_a_streamed_call_sees_the_picture_too(proxy, salt):
    text = post(proxy.url, features=features(1), cache_salt=salt, stream=True, return_token_ids=True).text
    assert f'"mm_placeholders":{{"image":[{{"offset":{PLACE["offset"]},"length":{TOKENS}}}]}}' in text
    assert text.endswith("data: [DONE]\n\n")


# --- pictures as they are --------------------------------------------------------------------------------------------------------


def raw(url: str, picture: bytes, salt: str, **members: Any) -> httpx.Response:
    return post(url, token_ids=RAW_PROMPT, content_parts=parts(picture), return_token_ids=True, cache_salt=salt, **members)


def test_a_picture_as_it_is_gives_what_it_gives_directly_and_the_reply_says_where_it_is(worker, proxy, salt):
    replies = [raw(proxy.url, picture, salt) for picture in (RED_PNG, BLUE_PNG)]
    assert tokens(replies[0]) != tokens(replies[1])
    assert [tokens(reply) for reply in replies] == [tokens(raw(worker.http, picture, f"{salt}-d")) for picture in (RED_PNG, BLUE_PNG)]
    reply = replies[0].json()
    assert (reply["prompt_token_ids"], reply["mm_placeholders"]) == (PROMPT, {"image": [PLACE]})
    assert reply["usage"]["prompt_tokens"] == len(PROMPT)


def test_the_same_picture_as_it_is_shares_its_prefix_and_another_does_not(worker, proxy, salt):
    hits = Hits(worker)
    found = []
    for picture in (RED_PNG, RED_PNG, BLUE_PNG, RED_PNG):
        raw(proxy.url, picture, salt).raise_for_status()
        found.append(hits.since())
    assert found == [0, BLOCK, 0, BLOCK]


def test_a_streamed_call_with_a_picture_as_it_is_says_where_it_is(proxy, salt):
    text = raw(proxy.url, RED_PNG, salt, stream=True).text
    assert f'"mm_placeholders":{{"image":[{{"offset":{PLACE["offset"]},"length":{TOKENS}}}]}}' in text


def test_the_worker_refuses_what_is_no_picture(proxy, salt):
    assert raw(proxy.url, b"\0\0\0", salt).status_code == 400
