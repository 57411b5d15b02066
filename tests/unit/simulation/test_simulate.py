"""`headrace simulate` as a person calls it."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from core.cli import main

SMALL = ["--workers", "2", "--set", "steps=1", "--set", "groups=4", "--set", "rollouts=2", "--set", "turns=2"]


def simulate(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["simulate", *arguments])


def test_policies_are_compared_on_one_trace():
    result = simulate(*SMALL, "--policy", "round-robin", "--json")
    assert result.exit_code == 0, result.output
    judged = json.loads(result.stdout)["round-robin"]
    assert (judged["calls"], judged["failed"]) == (16, 0)
    assert 0 < judged["hit_rate"] < 1
    assert 1 <= judged["imbalance"] < 2


def test_policies_joined_by_commas_are_asked_in_turn():
    result = simulate(*SMALL, "--policy", "session,round-robin")
    assert result.exit_code == 0, result.output
    assert "| session,round-robin | " in result.output
    spaced = simulate(*SMALL, "--policy", "consistent-hash, round-robin")
    assert spaced.exit_code == 0, spaced.output


def test_a_policy_that_the_settings_disable_is_refused(tmp_path: Path):
    config = tmp_path / "headrace.toml"
    config.write_text('[plugins]\ndisable = ["kv"]')
    result = simulate("--policy", "kv", "--config", str(config))
    assert "plugin 'kv' is disabled: take it from plugins.disable" in result.output


def test_the_same_seed_gives_the_same_numbers():
    assert simulate(*SMALL, "--seed", "3").output == simulate(*SMALL, "--seed", "3").output


def test_a_saved_trace_replays_to_the_same_numbers(tmp_path: Path):
    path = str(tmp_path / "trace.jsonl")
    made = simulate(*SMALL, "--save-trace", path)
    assert simulate("--workers", "2", "--trace", path).output == made.output


def test_the_plot_is_a_picture(tmp_path: Path):
    result = simulate(*SMALL, "--plot", str(tmp_path / "plot.png"))
    assert result.exit_code == 0, result.output
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        (["--policy", "round-robbin"], "there is no plugin 'round-robbin': did you mean 'round-robin'?"),
        (
            ["--policy", "stand-in"],
            "plugin 'stand-in' chooses no workers: known are ",
        ),
        (["--policy", "session,lora"], "plugin 'lora' chooses no workers: known are consistent-hash, "),
        (["--policy", "kv,"], "there is no plugin '': known are "),
        (["--set", "turns=many"], "--set: turns: Expected `int`, got `str`"),
        (["--set", "steps=0"], "--set: steps: Expected `int` >= 1"),
        (["--set", "step_seconds=inf"], "--set: step_seconds: Expected `float` <= 1000000"),
        (["--decode-seconds", "nan"], "Invalid value for --decode-seconds: it must be a number"),
        ([*SMALL, "--save-trace", "/there/is/no/folder"], "--save-trace: "),
        (["--set", "tunrs=2"], "--set: tunrs: there is no such key here; did you mean 'turns'?"),
        (["--trace", __file__], "test_simulate.py:1: Expected `object`, got `str`"),
        (["--trace", __file__, "--workload", "agents"], "two sources of turns"),
        (["--plot", "plot.nothing"], "a picture's name ends in .png, .svg or .pdf"),
    ],
)
def test_what_can_not_be_simulated_is_refused_in_words(arguments: list[str], wrong: str):
    result = simulate(*arguments)
    assert result.exit_code != 0
    assert wrong in result.output
