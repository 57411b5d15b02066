"""The commands that speak to a running headrace, against one."""

import io
import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from click.testing import CliRunner, Result

from core.cli import main
from core.remote.progress import Bars, Lines, UpdateProgress, WorkerProgress
from tests import workers
from tests.proxy import RunningProxy, headrace


@pytest.fixture(scope="module")
def proxy() -> Iterator[RunningProxy]:
    with workers.stand_in() as a, workers.stand_in() as b, headrace(a, b, settings="[probe]\ninterval = 0.1\n") as running:
        yield running


def run(proxy: RunningProxy, *arguments: str) -> Result:
    return CliRunner().invoke(main, arguments, env={"HEADRACE_URL": proxy.url})


def test_the_fleet_is_a_table(proxy):
    result = run(proxy, "fleet")
    assert result.exit_code == 0
    head, *rows = result.stdout.splitlines()
    assert head.split() == ["WORKER", "STATE", "VERSION", "MODEL", "RANKS", "CALLS", "COHORT", "REASON"]
    assert [row.split() for row in rows] == [[id_, "ready", "default", "tiny", "1", "0"] for id_ in ("w0", "w1")]
    assert [worker["id"] for worker in json.loads(run(proxy, "fleet", "--json").stdout)["workers"]] == ["w0", "w1"]


def test_the_fleet_is_paused_and_resumed(proxy):
    assert run(proxy, "fleet", "pause", "--mode", "wait").stdout == "w0 is paused: by a trainer\nw1 is paused: by a trainer\n"
    assert run(proxy, "fleet", "resume").stdout == "w0 is ready\nw1 is ready\n"


def test_an_update_by_steps_that_is_open_is_shown_below_the_table(proxy):
    def post(path: str, **body: Any) -> None:
        httpx.post(f"{proxy.url}{path}", json=body).raise_for_status()

    place = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 3}
    post("/init_weight_transfer_engine", init_info=place)
    post("/start_weight_update")
    line = run(proxy, "fleet").stdout.splitlines()[-1]
    silent = r"for \d+ s, its trainer silent for \d+ s; ends in \d+ s"
    assert re.fullmatch(rf"update \w+ \(steps\) of w0, w1 by 127\.0\.0\.1 python-httpx/\S+ {silent}", line), line
    post("/update_weights", update_info={"names": ["w"], "dtype_names": ["float32"], "shapes": [[1]]})
    post("/finish_weight_update")
    assert len(run(proxy, "fleet").stdout.splitlines()) == 3


def test_what_hangs_is_shown_with_whom_it_waits_for(monkeypatch):
    operations = [{"operation": "update_weights", "by": "10.0.0.1", "seconds": 75.2, "missing": ["b"]}]
    operations.append({"operation": "resume", "by": "10.0.0.2", "seconds": 3.0, "missing": None})
    monkeypatch.setattr(
        httpx, "request", lambda *_, **__: httpx.Response(200, json={"workers": [], "operations": operations, "updates": []})
    )
    assert CliRunner().invoke(main, ["fleet"]).stdout.splitlines()[1:] == [
        "update_weights by 10.0.0.1 for 75 s, waits for b",
        "resume by 10.0.0.2 for 3 s, waits for its turn",
    ]


def test_a_worker_is_drained_quarantined_and_released(proxy):
    assert run(proxy, "fleet", "drain", "w0").stdout.startswith("w0 is draining: by 127.0.0.1 ")
    assert run(proxy, "fleet", "quarantine", "w0", "--reason", "it smells").stdout == "w0 is quarantined: it smells\n"
    assert run(proxy, "fleet", "release", "w0").stdout == "w0 is ready\n"


def test_what_headrace_refuses_is_an_error_in_its_own_words(proxy):
    result = run(proxy, "fleet", "drain", "w9")
    assert (result.exit_code, result.stderr) == (1, "Error: there is no worker 'w9'; the fleet has w0, w1\n")
    result = run(proxy, "update", "--version", "7", "--transport", "pigeon", "-o", "path=/w")
    assert result.exit_code == 1
    assert "transport: there is no weight transport 'pigeon'" in result.stderr


def test_nobody_there_is_an_error_that_says_where():
    result = CliRunner().invoke(main, ["fleet", "--url", "http://127.0.0.1:9/"])
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: no headrace answers at http://127.0.0.1:9 (--url, $HEADRACE_URL): ")


def test_an_option_without_a_value_is_named(proxy):
    result = run(proxy, "update", "--version", "7", "--transport", "filesystem", "-o", "path")
    assert (result.exit_code, "'path' is not KEY=VALUE" in result.stderr) == (2, True)


RUNNING = UpdateProgress(
    "1", "7", "courier", "running", "applying", {"w0": WorkerProgress("applying"), "w10": WorkerProgress("done", "", 0.5)}, 1.25
)
FAILED = UpdateProgress(
    "1", "7", "courier", "failed", "done", {"w0": WorkerProgress("failed", "no file"), "w10": RUNNING.workers["w10"]}, 2.0
)


def test_on_a_terminal_every_worker_has_a_bar_that_is_drawn_again_in_its_place():
    out = io.StringIO()
    bars = Bars(out)
    bars.show(RUNNING)
    first = out.getvalue()
    assert first.replace("\x1b[2K", "").splitlines()[:3] == [
        "w0  [##########----------] applying",
        "w10 [####################] done in 0.50 s",
        "applying, 1.2 s",
    ]
    bars.show(FAILED)
    second = out.getvalue().removeprefix(first)
    assert second.startswith("\x1b[3A\x1b[2Kw0  [!!!!!!!!!!!!!!!!!!!!] failed: no file\n")


def test_more_workers_than_the_terminal_has_lines_are_counted(monkeypatch):
    monkeypatch.setenv("LINES", "6")
    out = io.StringIO()
    many = {f"w{i}": WorkerProgress("done" if i < 3 else "applying") for i in range(8)}
    Bars(out).show(UpdateProgress("1", "7", "courier", "running", "applying", many, 1.0))
    lines = out.getvalue().replace("\x1b[2K", "").splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["w3", "w4", "w5", "…"]
    assert lines[3] == "… and 5 more"


def test_elsewhere_every_change_is_a_line():
    out = io.StringIO()
    lines = Lines(out)
    for progress in (RUNNING, RUNNING, FAILED):
        lines.show(progress)
    assert out.getvalue().splitlines() == [
        "1.25 s: applying",
        "1.25 s: w0: applying",
        "1.25 s: w10: done in 0.50 s",
        "2.00 s: done",
        "2.00 s: w0: failed: no file",
    ]
