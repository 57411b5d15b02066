"""Workers read a trainer's memory over NIXL: the scenarios of `scenarios.py`, each in a process that has torch."""

import json
import subprocess
from typing import Any

import pytest

from tests.workers import components
from tests.workers.modules import in_engine

pytestmark = pytest.mark.real

#: Before the line that counts.
RESULT = "result: "


@pytest.fixture(scope="module", autouse=True)
def _nixl() -> None:
    if reason := components.why_not("nixl"):
        pytest.skip(f"no NIXL here: {reason}")


def outcome(scenario: str) -> Any:
    command = in_engine(f"{__package__}.scenarios", scenario, nixl=True)
    run = subprocess.run(**command, capture_output=True, text=True, timeout=180, check=False)
    assert run.returncode == 0, run.stderr
    # UCX writes its warnings to standard output, too.
    [line] = [line for line in run.stdout.splitlines() if line.startswith(RESULT)]
    return json.loads(line.removeprefix(RESULT))


def test_tensors_of_any_type_and_shape_arrive_through_buffers_of_any_size():
    came = outcome("everything_arrives")
    assert came["results"] == [[[came["size"]] * 2, [True, True]]] * 3


def test_each_update_brings_what_the_tensors_hold_at_that_time():
    assert outcome("weights_change") == [True] * 3


def test_what_cannot_be_read_is_named_and_the_reload_forgotten():
    came = outcome("wrong_address")
    assert [reason.partition(":")[0] for reason in came["reasons"]] == ["layer.3 and what follows it can't be read"]
    assert came["forgotten"]


def test_a_trainer_that_dies_is_noticed_and_the_next_one_is_read():
    came = outcome("the_trainer_dies")
    assert came["reasons"][0].startswith("the trainer can't be reached: ")
    assert came["reasons"][0].endswith(". This rank has the weights that it had")
    assert came["reasons"][1].startswith("layer.4 and what follows it can't be read: ")
    assert came["whole"] == [True, True]


def test_a_trainer_that_hangs_is_waited_for_as_long_as_the_settings_say():
    assert (
        outcome("the_trainer_hangs")
        == "layer.4 and what follows it can't be read: TimeoutError: not done within 1 s. The weights are a mixture now"
    )


def test_shards_and_tensors_on_several_kinds_of_device_are_refused_before_anybody_is_asked():
    came = outcome("what_is_refused")
    assert [error.partition(":")[0] for error in came["errors"]] == ["TypeError", "ValueError", "ValueError"]
    assert "cpu and meta" in came["errors"][1]
    assert came["asked"] == 0
