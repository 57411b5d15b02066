"""Media through a real headrace, in front of models that read only text: refused, and never answered as if there had been none."""

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.proxy import RunningProxy, headrace
from tests.workers import RunningWorker
from tests.workers.images import IN_PROMPT, OFFSET, TOKENS, png, prepared

FEATURES = {
    "mm_hashes": {"image": ["h"]},
    "mm_placeholders": {"image": [{"offset": OFFSET, "length": TOKENS}]},
    "kwargs_data": {"image": [base64.b64encode(prepared(1)).decode()]},
}
PARTS = [{"type": "image_url", "url": "data:image/png;base64," + base64.b64encode(png(255, 0, 0)).decode()}]


@pytest.fixture(scope="module", params=["both", "http"])
def proxy(request: pytest.FixtureRequest, worker: RunningWorker) -> Iterator[RunningProxy]:
    with headrace(worker, wires=request.param) as proxy:
        yield proxy


def ask(proxy: RunningProxy, **members: Any) -> httpx.Response:
    body = {"token_ids": [min(token, 300) for token in IN_PROMPT], "sampling_params": {"max_tokens": 2}, **members}
    return httpx.post(f"{proxy.url}/inference/v1/generate", json=body, timeout=30)


@pytest.mark.parametrize("members", [{"features": FEATURES}, {"content_parts": PARTS}], ids=["features", "content_parts"])
@pytest.mark.parametrize("stream", [False, True])
def test_media_are_refused(proxy, members, stream):
    reply = ask(proxy, stream=stream, **members)
    assert reply.status_code == 400, reply.text
    assert "error" in reply.json()


def test_a_call_without_media_is_answered(proxy):
    assert ask(proxy).status_code == 200


def test_features_that_are_wrong_are_refused_for_what_is_wrong(proxy):
    reply = ask(proxy, features=FEATURES | {"kwargs_data": {"image": ["AAAA"]}})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "features.kwargs_data.image[0]")
