"""The counts in what passes: where they are found, and that nothing else is read."""

import json
from typing import Any

import pytest

from core import Outcome
from plugins.openai_relay.usage import KEPT, UsageReader
from tests.unit.core.rig import make_call

CHAT = {"prompt_tokens": 17, "total_tokens": 20, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 8}}
RESPONSES = {"input_tokens": 17, "output_tokens": 3, "total_tokens": 20, "input_tokens_details": {"cached_tokens": 8}}
COUNTED, UNCOUNTED = (17, 3, 8), (0, 0, None)


def counts(*pieces: bytes, stream: bool = False) -> tuple[int, int, int | None]:
    reader, outcome = UsageReader(), Outcome(kind="ok", status=200)
    for piece in pieces:
        reader.see(piece)
    reader.settle(make_call(stream=stream), outcome)
    return outcome.prompt_tokens, outcome.output_tokens, outcome.cached_tokens


def reply(usage: Any, **members: Any) -> bytes:
    return json.dumps({"id": "c", "usage": usage, **members}).encode()


def events(*data: Any, end: bytes = b"data: [DONE]\n\n") -> bytes:
    return b"".join(b"data: " + json.dumps(each).encode() + b"\n\n" for each in data) + end


@pytest.mark.parametrize("usage", [CHAT, RESPONSES])
def test_a_reply_has_its_counts_wherever_it_was_split(usage):
    whole = reply(usage, after=[1])
    assert all(counts(whole[:i], whole[i:]) == COUNTED for i in range(len(whole)))


def test_an_embedding_has_no_output():
    assert counts(reply({"prompt_tokens": 4, "total_tokens": 4})) == (4, 0, None)


def test_a_stream_has_its_counts_in_the_last_event_that_has_any():
    chunk = {"choices": [{"delta": {"content": 'data: {"usage": 1}'}}], "usage": None}
    assert counts(events(chunk, {"usage": {"prompt_tokens": 1}}, {"choices": [], "usage": CHAT}), stream=True) == COUNTED
    assert counts(events(chunk, chunk), stream=True) == UNCOUNTED


def test_a_stream_of_many_pieces_is_kept_only_at_its_end():
    reader, outcome = UsageReader(), Outcome(kind="ok", status=200)
    for _ in range(1000):
        reader.see(events({"x": "y" * 1000}, end=b""))
        assert reader._kept <= 2 * KEPT + 2000
    reader.see(events({"usage": CHAT}))
    reader.settle(make_call(stream=True), outcome)
    assert (outcome.prompt_tokens, outcome.output_tokens) == (17, 3)


def test_a_stream_of_the_responses_route_has_them_in_its_last_response():
    stream = b'event: x\ndata: {"type": "x"}\n\nevent: response.completed\n' + events({"response": {"usage": RESPONSES}}, end=b"")
    assert counts(stream, stream=True) == COUNTED


def test_a_large_reply_is_not_read():
    assert counts(reply(CHAT, x="y" * (KEPT - 200))) == COUNTED
    assert counts(reply(CHAT, x="y" * KEPT)) == UNCOUNTED


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"null", b"\x1f\x8b\x08", b'{"usage": 5}', b'{"usage": {"prompt_tokens": "x"}}', b'{"usage":' * 5000]
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_has_no_counts_says_nothing(data, stream):
    assert counts(data, stream=stream) == UNCOUNTED
    assert counts(b"data: " + data + b"\n\n", stream=stream) == UNCOUNTED
