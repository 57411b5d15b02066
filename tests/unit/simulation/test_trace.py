from itertools import islice, pairwise
from pathlib import Path

import pytest

from core.simulation.trace import TraceError, Turn, read_trace, sessions, write_trace
from core.simulation.workloads import WORKLOADS, Workload


def test_a_trace_that_was_written_can_be_read(tmp_path: Path):
    turns = list(Workload(steps=1, groups=2, rollouts=2, turns=3).trace())
    write_trace(tmp_path / "trace.jsonl", turns)
    assert read_trace(tmp_path / "trace.jsonl") == turns


@pytest.mark.parametrize(
    ("lines", "wrong"),
    [
        ("", "there is no turn in it"),
        ('{"session": "a"}', "1: Object missing required field `prompt_tokens`"),
        ('{"session": "a", "prompt_tokens": 1, "output_tokens": 1}', "1: session 'a': the first turn of a session needs at"),
        (
            '{"session": "a", "at": 0, "prompt_tokens": 1, "output_tokens": 1}\n'
            '{"session": "a", "at": 1, "prompt_tokens": 1, "output_tokens": 1}',
            "2: session 'a': only the first turn of a session has at",
        ),
        ('{"session": "a", "at": 0, "prompt": 1, "output_tokens": 1}', "1: Object contains unknown field `prompt`"),
        ('{"session": "a", "at": 0, "prompt_tokens": 1, "output_tokens": 0}', "1: Expected `int` >= 1"),
    ],
)
def test_a_trace_that_cannot_be_replayed_is_refused_by_its_line(tmp_path: Path, lines: str, wrong: str):
    path = tmp_path / "trace.jsonl"
    path.write_text(lines)
    with pytest.raises(TraceError) as refused:
        read_trace(path)
    assert wrong in str(refused.value)


def test_rollouts_of_a_group_share_their_prompt_and_steps_share_nothing():
    first, second, *_, last = Workload(steps=2, groups=1, rollouts=2).trace()
    assert first.blocks == second.blocks
    assert first.output_blocks != second.output_blocks
    assert not set(first.blocks) & set(last.blocks)
    assert (first.salt, last.salt) == ("0", "1")


def test_a_turn_begins_with_what_was_said_before():
    turns = list(Workload(steps=1, groups=1, rollouts=1, turns=3).trace())
    for before, after in pairwise(turns):
        said = before.blocks + before.output_blocks
        assert after.blocks[: len(said)] == said
        assert after.at is None


def test_the_same_seed_makes_the_same_trace():
    for make in WORKLOADS.values():
        assert list(islice(make().trace(1), 20)) == list(islice(make().trace(1), 20))
        assert list(islice(make().trace(1), 20)) != list(islice(make().trace(2), 20))


def test_sessions_keep_the_order_of_their_turns():
    turns = [Turn(session=name, at=0.0, prompt_tokens=number, output_tokens=1) for number, name in enumerate("abab")]
    assert [[turn.prompt_tokens for turn in session] for session in sessions(turns)] == [[0, 2], [1, 3]]
