"""What a replay makes of a trace's turns, and what it shows of the policies on the included one."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from core.cli import main
from core.simulation.replay import _tokens
from core.simulation.trace import Turn

ROOT = Path(__file__).parents[3]
POLICIES = ("round-robin", "consistent-hash", "kv")
ROLLOUTS = ["simulate", "--workload", "rollouts", *(f"--policy={policy}" for policy in POLICIES)]


def turn(session: str, *blocks: int) -> Turn:
    return Turn(session=session, blocks=list(blocks), prompt_tokens=16 * len(blocks) + 5, output_tokens=1)


def test_prompts_are_equal_where_their_blocks_are_and_nowhere_else():
    turns = [(turn("s", 1, 2), 0), (turn("s", 1, 3), 1), (turn("other", 1, 2), 0)]
    one, next_turn, other = (_tokens(turn, number, 16) for turn, number in turns)
    assert one == _tokens(*turns[0], 16)
    assert one[:16] == next_turn[:16] == other[:16]
    assert one[16:32] == other[16:32] != next_turn[16:32]
    assert len({tuple(tokens[32:]) for tokens in (one, next_turn, other)}) == 3, "what fills no block is of one turn alone"


@pytest.fixture(scope="module")
def judged() -> dict[str, dict[str, float]]:
    result = CliRunner().invoke(main, [*ROLLOUTS, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_kv_finds_more_cached_than_the_others_at_equal_balance(judged):
    kv, others = judged["kv"], [judged[policy] for policy in POLICIES if policy != "kv"]
    assert kv["hit_rate"] > 1.5 * max(other["hit_rate"] for other in others)
    assert kv["imbalance"] < 1.05 * min(other["imbalance"] for other in others)


def test_the_readmes_have_these_numbers(judged):
    rows = re.findall(r"^\| ([\w-]+) \| ([\d.]+%) \| ([\d.]+) \|", _table("README.md", "| 16 workers, `rollouts`"), re.MULTILINE)
    assert rows == [(name, f"{it['hit_rate']:.1%}", f"{it['imbalance']:.2f}") for name, it in judged.items()]
    table = _table("plugins/routing_kv/README.md", "| | rollouts: hit rate")
    for name, hit_rate, imbalance in rows:
        assert f"| `{name}` | {hit_rate} | {imbalance} |" in table


def test_the_readme_has_the_command_of_its_table():
    [command] = re.findall(r"^headrace (simulate --workload rollouts .*) --plot", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert command.replace("--policy ", "--policy=").split() == ROLLOUTS


def _table(path: str, begins: str) -> str:
    text = (ROOT / path).read_text()
    start = text.index(begins)
    return text[start : text.index("\n\n", start)]
