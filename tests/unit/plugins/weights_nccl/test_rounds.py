"""What the trainer's and the workers' end of a broadcast do with each other, and when one of them fails; see `scenarios`."""

import json
import re
import subprocess
from typing import Any

import pytest

from tests import workers
from tests.workers.modules import in_engine

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def came(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What came of each scenario."""
    if reason := workers.why_not("engine"):
        pytest.skip(f"no torch here: {reason}")
    log = tmp_path_factory.mktemp("rounds") / "log"
    with log.open("w") as errors:
        # Without a time-out: each scenario has its own, after which its threads say where they are.
        done = subprocess.run(**in_engine(f"{__package__}.scenarios"), stdout=subprocess.PIPE, stderr=errors, check=False)
    assert done.returncode == 0, log.read_text()[-5000:]
    return dict(json.loads(line) for line in done.stdout.splitlines())


def test_tensors_of_any_type_and_shape_arrive_on_every_rank_whatever_the_size_of_a_message(came):
    assert came["everything_arrives"] == [[True] * 5] * 3


def test_a_group_is_used_again_for_as_long_as_all_ranks_are_in_it(came):
    scenario = came["groups_last"]
    assert scenario["groups"] == [[1, 1, 3, 4], [1, 1], [3, 4], [4]]
    assert scenario["whole"] == [True] * 3


def test_rounds_leave_nothing_in_the_store(came):
    first, second = came["groups_last"]["keys"]
    assert first == second


def test_the_workers_leave_when_the_publisher_is_closed(came):
    assert came["groups_last"]["left"] == 1


def test_nobody_is_touched_when_one_cannot_come(came):
    scenario = came["one_cannot_come"]
    reason = "the trainer called it off: version 1: b: it has no receive_broadcast. This rank has the weights that it had"
    assert scenario["workers"] == {"a": reason, "b": "it has no receive_broadcast"}
    assert scenario["touched"] == 0
    assert scenario["whole"] == [True, True]


def test_one_that_cannot_load_passes_everything_on_and_forgets_its_reload(came):
    scenario = came["one_cannot_load"]
    assert scenario["workers"] == {"a": "'there is no layer.3 in this model'"}
    assert scenario["other"]
    assert scenario["forgotten"] == [1, 0]
    assert scenario["whole"] == [True, True]


def test_the_trainers_own_error_comes_out_and_the_workers_are_told(came):
    scenario = came["the_trainer_cannot_go_on"]
    assert scenario["came out"] == "KeyboardInterrupt"
    reason = "after 3 of 8 messages: the trainer broke off: KeyboardInterrupt. The weights are a mixture now"
    assert scenario["reasons"] == [reason, reason]
    assert scenario["reloads"] == [[3, 8], [3, 8]]
    assert scenario["whole"] == [True, True]


def test_a_trainer_that_dies_leaves_nobody_waiting_and_the_next_one_mends_all(came):
    scenario = came["the_trainer_dies"]
    before, amid = ([re.sub(r"127\S+", "HOST", reason) for reason in reasons] for reasons in scenario["reasons"])
    # On a busy machine a rank may come so late that it finds nobody at all.
    missed = re.compile(r"the trainer at HOST (has gone|can't be reached: .*)\. This rank has the weights that it had")
    assert all(map(missed.fullmatch, before))
    assert amid == ["after 4 of 8 messages: the trainer at HOST has gone. The weights are a mixture now"] * 2
    assert scenario["whole"] == [True, True]


def test_a_worker_that_dies_ends_the_broadcast_for_all_and_the_next_one_goes_without_it(came):
    scenario = came["a_worker_dies"]
    assert scenario["workers"]["b"] == "its connection broke"
    assert re.match(r"after \d of 8 messages: the trainer broke off: .*The weights are a mixture now", scenario["workers"]["a"])
    assert scenario["whole"]


def test_workers_are_called_off_when_headrace_has_gone(came):
    scenario = came["headrace_dies"]
    assert scenario["failed"].startswith("version 1: headrace can't be reached: ")
    assert scenario["reason"].startswith("a: the trainer called it off: version 1: headrace can't be reached")
    assert scenario["touched"] == 0


def test_a_rank_waits_for_nobody_for_ever(came):
    unreachable, silent = came["nobody_answers"]
    assert unreachable.startswith("the trainer at 127.0.0.1:1 can't be reached: ")
    assert silent == "the trainer has waited for others for more than 1 s. This rank has the weights that it had"


def test_a_shard_of_a_tensor_is_refused(came):
    scenario = came["a_shard_is_refused"]
    assert scenario["error"].startswith("w: a sharded tensor; gather the whole one first")
    assert scenario["asked"] == 0
