"""What a replay makes of a trace's turns."""

from core.simulation.replay import _tokens
from core.simulation.trace import Turn


def turn(session: str, *blocks: int) -> Turn:
    return Turn(session=session, blocks=list(blocks), prompt_tokens=16 * len(blocks) + 5, output_tokens=1)


def test_prompts_are_equal_where_their_blocks_are_and_nowhere_else():
    turns = [(turn("s", 1, 2), 0), (turn("s", 1, 3), 1), (turn("other", 1, 2), 0)]
    one, next_turn, other = (_tokens(turn, number, 16) for turn, number in turns)
    assert one == _tokens(*turns[0], 16)
    assert one[:16] == next_turn[:16] == other[:16]
    assert one[16:32] == other[16:32] != next_turn[16:32]
    assert len({tuple(tokens[32:]) for tokens in (one, next_turn, other)}) == 3, "what fills no block is of one turn alone"
