"""What the trainer's end writes, and when; see `scenarios`."""

import json
import subprocess
from typing import Any

import pytest

from tests import workers
from tests.workers.modules import in_engine

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def came(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What came of it."""
    if reason := workers.why_not("engine"):
        pytest.skip(f"no torch here: {reason}")
    scenarios = in_engine(f"{__package__}.scenarios", tmp_path_factory.mktemp("weights"))
    done = subprocess.run(**scenarios, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


def test_tensors_of_any_kind_are_written_whole(came):
    assert set(came["whole"].values()) == {True}


def test_headrace_is_asked_when_the_checkpoint_is_complete(came):
    files = ["STABLE", "model.safetensors"]
    assert came["asked"] == [["1", "version-1", files], ["2", "version-2", files], ["3.rc-1", "version-3.rc-1", files]]


def test_the_latest_versions_are_kept(came):
    assert came["kept"] == ["version-2", "version-3.rc-1"]
    assert came["alone"] == ["version-2"]


def test_a_version_that_failed_costs_none_that_the_workers_have(came):
    assert came["kept while it fails"] == ["version-2", "version-3.rc-1", "version-4"]


def test_a_version_that_is_published_again_replaces_what_was_there(came):
    assert came["again"] == [["other"], ["version-3.rc-1", "version-4"]]


def test_a_version_that_names_no_folder_is_refused(came):
    wanted = "version {!r}: of letters, digits, '.', '_' and '-'"
    assert came["refused"] == [wanted.format(version) for version in ("../5", "", "a b", ".5")]
