"""When a relayed answer has begun: from its first bytes on, whatever they are, only that a call which was refused can go back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import WorkerPaused
from core.wire.beginnings import has_begun

ROLE = b'data: {"choices":[{"delta":{"role":"assistant"}}]}\n\n'
PAUSED = b'{"error":{"message":"Generation is paused. Please retry after it resumes.","code":503}}'


def begun(data: bytes, *, status: int = 200, events: bool = True, ended: bool = False) -> bool:
    return has_begun(data, status=status, events=events, ended=ended)


@pytest.mark.parametrize(
    "event",
    [
        b'{"choices":[{"text":"a"}]}',
        b'{"choices":[{"text":"","finish_reason":"stop"}]}',
        b'{"choices":[{"delta":{"role":"assistant","content":"a"}}]}',
        b'{"choices":[{"delta":{"tool_calls":[{"id":"x"}]}}]}',
        b'{"choices":[{"text":""},{"text":"b"}]}',
        b'{"choices":[],"usage":{}}',
        b'{"error":{"message":"no","code":400}}',
        b'{"error":"Generation is paused"}',
        b'{"choices":7}',
        b"{}",
        b"[DONE]",
        b"{",
    ],
)
def test_an_event_that_says_something_begins_an_answer(event):
    assert begun(b"data: " + event + b"\n\n")
    assert begun(ROLE + b"data: " + event + b"\n\n")


@pytest.mark.parametrize("data", [b"data: [", b"data:{", b"event: x", b": ping\n\n", b"x", b"\n\n"])
def test_what_is_not_the_beginning_of_an_object_begins_one_at_once(data):
    assert begun(data)


@pytest.mark.parametrize("data", [b"d", b"data: ", b'data: {"choices":[{"text":"a"}]}', b'data: {"x', ROLE, ROLE + b"dat", ROLE * 2])
def test_before_it_there_are_events_without_output_and_unfinished_ones(data):
    assert not begun(data)
    assert begun(data, ended=True)


def test_of_an_event_that_is_too_long_to_be_a_refusal_the_end_is_not_waited_for():
    assert begun(b'data: {"choices":"' + bytes(20_000))
    assert begun(bytes(20_000), status=503, events=False)


def test_a_503_has_begun_at_its_end_and_any_other_status_at_once():
    assert not begun(PAUSED, status=503, events=False)
    assert begun(b'{"error":{"message":"overloaded"}}', status=503, events=False, ended=True)
    assert begun(b"", status=500, events=False)


@pytest.mark.parametrize("before", [b"", ROLE, ROLE * 2])
def test_the_refusal_of_a_paused_worker_is_raised(before):
    with pytest.raises(WorkerPaused, match="paused"):
        begun(before + b"data: " + PAUSED + b"\n\n")
    with pytest.raises(WorkerPaused):
        begun(PAUSED, status=503, events=False, ended=True)


@given(st.binary(max_size=60), st.sampled_from([200, 503]), st.booleans(), st.booleans())
def test_whatever_comes_it_has_begun_at_the_end(data, status, events, more):
    assert begun((ROLE if more else b"") + data, status=status, events=events, ended=True)
