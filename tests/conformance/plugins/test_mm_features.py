"""Media through a real headrace: to an engine under the name of their content, and never to a model that reads only text."""

import base64
import hashlib
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests import workers
from tests.proxy import RunningProxy, headrace
from tests.workers import RunningWorker
from tests.workers.images import IN_PROMPT, OFFSET, TOKENS, png, prepared
from tests.workers.tiny_vision import IMAGE, VISION_END, VISION_START

FEATURES = {
    "mm_hashes": {"image": ["h"]},
    "mm_placeholders": {"image": [{"offset": OFFSET, "length": TOKENS}]},
    "kwargs_data": {"image": [base64.b64encode(prepared(1)).decode()]},
}
PARTS = [{"type": "image_url", "url": "data:image/png;base64," + base64.b64encode(png(255, 0, 0)).decode()}]


RAW_PROMPT = [VISION_START, IMAGE, VISION_END]


@pytest.fixture(scope="module", params=["both", "http"])
def proxy(request: pytest.FixtureRequest, worker: RunningWorker) -> Iterator[RunningProxy]:
    with headrace(worker, wires=request.param) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def seeing() -> Iterator[RunningWorker]:
    if reason := workers.why_not("scripted"):
        pytest.skip(f"no scripted worker here: {reason}")
    with workers.scripted(sees=True) as worker:
        yield worker


@pytest.fixture(scope="module")
def bound(seeing: RunningWorker) -> Iterator[RunningProxy]:
    """With a tower that adapters change."""
    with headrace(seeing, settings='[plugins.mm-features]\ntower = "adapter"\n[plugins.lora]\nallowed_paths = ["/"]\n') as proxy:
        yield proxy


def ask(proxy: RunningProxy, **members: Any) -> httpx.Response:
    body = {"token_ids": IN_PROMPT, "sampling_params": {"max_tokens": 2}, **members}
    return httpx.post(f"{proxy.url}/inference/v1/generate", json=body, timeout=30)


#: For models without the special tokens.
BLIND_PROMPT = [min(token, 300) for token in IN_PROMPT]


@pytest.mark.parametrize("members", [{"features": FEATURES}, {"content_parts": PARTS}], ids=["features", "content_parts"])
@pytest.mark.parametrize("stream", [False, True])
def test_media_are_refused(proxy, members, stream):
    reply = ask(proxy, token_ids=BLIND_PROMPT, stream=stream, **members)
    assert reply.status_code == 400, reply.text
    assert "error" in reply.json()


def test_a_call_without_media_is_answered(proxy):
    assert ask(proxy, token_ids=BLIND_PROMPT).status_code == 200


def test_features_that_are_wrong_are_refused_for_what_is_wrong(proxy):
    reply = ask(proxy, features=FEATURES | {"kwargs_data": {"image": ["AAAA"]}})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "features.kwargs_data.image[0]")


# --- what an engine sees ---------------------------------------------------------------------------------------------------------


def seen(worker: RunningWorker, reply: httpx.Response) -> dict[str, Any]:
    """The request as it reached the engine."""
    assert reply.status_code == 200, reply.text
    return next(event for event in worker.engine_events("add") if event["external_req_id"] == reply.headers["x-request-id"])


def identifier(request: dict[str, Any]) -> str:
    [feature] = request["mm_features"]
    return feature["identifier"]


@pytest.mark.real
def test_the_engine_sees_salt_place_and_the_name_of_the_content(seeing, bound):
    request = seen(seeing, ask(bound, features=FEATURES, cache_salt="7"))
    [feature] = request["mm_features"]
    digest = hashlib.sha256(b"image\0" + prepared(1)).hexdigest()
    assert (request["cache_salt"], feature["modality"], feature["identifier"]) == ("7", "image", digest)
    assert (feature["mm_position"]["offset"], feature["mm_position"]["length"]) == (OFFSET, TOKENS)
    assert request["prompt_token_ids"] == IN_PROMPT


@pytest.mark.real
def test_a_picture_as_it_is_reaches_the_engine_under_the_name_of_its_content(seeing, bound):
    reply = ask(bound, content_parts=PARTS, token_ids=RAW_PROMPT)
    request = seen(seeing, reply)
    assert identifier(request) == hashlib.sha256(b"image\0" + png(255, 0, 0)).hexdigest()
    assert request["prompt_token_ids"] == reply.json()["prompt_token_ids"] == IN_PROMPT
    assert reply.json()["mm_placeholders"] == {"image": [{"offset": OFFSET, "length": TOKENS}]}


@pytest.mark.real
@pytest.mark.real
def test_prompt_logprobs_of_a_picture_have_the_own_token_of_the_prompt_that_the_worker_made_first(bound):
    """The engine gives the candidates in no particular order; several prompts make it unlikely that all are right by chance."""
    prompt = [65, *RAW_PROMPT, *range(70, 100)]
    reply = ask(bound, token_ids=prompt, content_parts=PARTS, sampling_params={"max_tokens": 1, "prompt_logprobs": 5})
    assert reply.status_code == 200, reply.text
    whole = reply.json()
    assert len(whole["prompt_token_ids"]) > len(prompt)
    own = [next(iter(position)) for position in whole["prompt_logprobs"][1:]]
    assert own == [str(token) for token in whole["prompt_token_ids"][1:]]


def test_with_an_adapter_the_name_is_bound_to_it(seeing, bound, tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    adapter = {"lora_name": "math", "lora_path": str(tmp_path)}
    httpx.post(f"{bound.url}/v1/load_lora_adapter", json=adapter, timeout=30).raise_for_status()
    try:
        plain = seen(seeing, ask(bound, features=FEATURES))
        adapted = seen(seeing, ask(bound, features=FEATURES, model="math"))
    finally:
        httpx.post(f"{bound.url}/v1/unload_lora_adapter", json={"lora_name": "math"}, timeout=30).raise_for_status()
    assert identifier(adapted) == f"math:{identifier(plain)}"
    assert adapted["lora_request"]
