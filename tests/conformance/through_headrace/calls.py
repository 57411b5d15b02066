"""Bodies of calls, and what is read from replies."""

import json
from typing import Any

import httpx

PATH = "/inference/v1/generate"
PROMPT = list(b"Hello, w!")


def body(*, prompt: list[int] = PROMPT, sampling: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """A call for four greedy tokens, with what is given on top."""
    return {"token_ids": prompt, "sampling_params": {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True} | (sampling or {})} | fields


def reply(client: httpx.Client, sent: dict[str, Any], **headers: str) -> dict[str, Any]:
    """The reply to a call that is answered; headers with `_` for `-`."""
    response = client.post(PATH, json=sent, headers={name.replace("_", "-"): value for name, value in headers.items()})
    assert response.status_code == 200, response.text
    return response.json()


def events(client: httpx.Client, sent: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a streamed call, after a look at their framing."""
    response = client.post(PATH, json=sent | {"stream": True})
    assert (response.status_code, response.headers["content-type"]) == (200, "text/event-stream"), response.text
    *blocks, end = response.text.split("\n\n")
    blocks = [block for block in blocks if block != ": keep-alive"]
    assert end == ""
    assert all(block.startswith("data: ") for block in blocks)
    *chunks, done = [block.removeprefix("data: ") for block in blocks]
    assert done == "[DONE]"
    return [json.loads(chunk) for chunk in chunks]


def refusal(client: httpx.Client, sent: Any, **headers: str) -> tuple[int, dict[str, Any]]:
    """Status and error of a call that is refused, after a look at the error's form."""
    response = client.post(PATH, json=sent, headers={name.replace("_", "-"): value for name, value in headers.items()})
    error = response.json()["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert error["code"] == response.status_code
    return response.status_code, error


def tokens(chunks: list[dict[str, Any]], index: int = 0) -> list[int]:
    """The output of a streamed call."""
    return [token for chunk in chunks for choice in chunk["choices"] if choice["index"] == index for token in choice["token_ids"]]
