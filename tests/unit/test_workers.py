"""Whatever starts and installs the workers: nothing may survive, and nothing may be half there."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import grpc
import httpx
import pytest

from core.wire.generated import inference_pb2 as pb
from tests import workers
from tests.proxy import wait_for
from tests.workers import cache, components, tiny_model
from tests.workers.launch import flags_of
from tests.workers.processes import Command, Processes, StartFailed, accepts, free_ports
from tests.workers.scripted_engine import tokens

# A shell that starts a process of its own, says who both are, and waits for it.
_FAMILY = ["sh", "-c", "sleep 1000 & echo $$ $!; wait"]

_HOLDER = """
import sys, time
from pathlib import Path
from tests.workers.processes import Command, Processes
with Processes([Command(["sh", "-c", "sleep 1000 & echo $$ $!; wait"], Path(sys.argv[1]), {})]):
    time.sleep(1000)
"""


def family_of(log: Path) -> list[int]:
    def pids() -> list[int]:
        words = log.read_text().split() if log.exists() else []
        return [int(word) for word in words] if len(words) == 2 else []

    return wait_for(pids)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(pids: list[int]) -> None:
    wait_for(lambda: not any(map(is_alive, pids)))


def test_the_end_of_the_context_ends_grandchildren_too(tmp_path):
    with Processes([Command(_FAMILY, tmp_path / "log", {})]):
        family = family_of(tmp_path / "log")
        assert all(map(is_alive, family))
    assert not any(map(is_alive, family))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_processes_end_when_whoever_started_them_is_killed(tmp_path, number):
    log = tmp_path / "log"
    holder = subprocess.Popen([sys.executable, "-c", _HOLDER, log])
    try:
        family = family_of(log)
    finally:
        holder.send_signal(number)
        holder.wait()
    wait_until_gone(family)


def test_processes_end_when_even_their_supervisor_is_killed(tmp_path):
    with Processes([Command(["sh", "-c", "echo $$ $$; exec sleep 1000"], tmp_path / "log", {})]) as processes:
        family = family_of(tmp_path / "log")
        os.kill(processes.supervisor_pid, signal.SIGKILL)
        wait_until_gone(family)


def test_processes_outlive_the_thread_that_started_them(tmp_path):
    with contextlib.ExitStack() as stack:
        thread = threading.Thread(target=lambda: stack.enter_context(Processes([Command(_FAMILY, tmp_path / "log", {})])))
        thread.start()
        thread.join()
        assert all(map(is_alive, family_of(tmp_path / "log")))


def test_a_process_that_ends_before_it_is_ready_is_reported_with_its_last_words(tmp_path):
    command = Command(["sh", "-c", "echo no such model; exit 3"], tmp_path / "log", {})
    with Processes([command]) as processes, pytest.raises(StartFailed, match=r"(?s)sh ended with status 3 .*no such model"):
        processes.wait_until(lambda: False, timeout=30)


def test_a_process_that_is_never_ready_is_reported_after_the_time_out(tmp_path):
    command = Command(["sh", "-c", "echo still loading; sleep 1000"], tmp_path / "log", {})
    with Processes([command]) as processes, pytest.raises(StartFailed, match=r"(?s)not ready after 1 s.*still loading"):
        processes.wait_until(lambda: False, timeout=1)


def test_the_environment_is_added_to_ours(tmp_path, monkeypatch):
    monkeypatch.setenv("OURS", "1")
    log = tmp_path / "log"
    with Processes([Command(["sh", "-c", "echo $OURS $THEIRS"], log, {"THEIRS": "2"})]):
        assert family_of(log) == [1, 2]


def test_free_ports_are_distinct_and_free():
    ports = free_ports(8)
    assert len(set(ports)) == 8
    assert not any(map(accepts, ports))


def test_every_worker_answers_on_both_wires_and_is_idle_afterwards(worker):
    body = {"model": worker.model, "token_ids": [65, 66], "sampling_params": {"max_tokens": 2, "temperature": 0.0, "ignore_eos": True}}
    over_http = httpx.post(f"{worker.http}/inference/v1/generate", json=body, timeout=60).raise_for_status().json()
    request = pb.GenerateRequest(
        model=worker.model,
        token_ids=pb.TokenIds(ids=[65, 66]),
        stopping=pb.StoppingCriteria(max_new_tokens=2, ignore_eos=True),
        response=pb.ResponseOptions(output_token_ids=True),
    )
    with grpc.insecure_channel(worker.grpc) as channel:
        generate = channel.unary_unary("/vllm.Inference/Generate", pb.GenerateRequest.SerializeToString, pb.GenerateResponse.FromString)
        over_grpc = generate(request, timeout=60)
    assert over_http["choices"][0]["token_ids"] == list(over_grpc.outputs.token_ids)
    assert len(over_grpc.outputs.token_ids) == 2
    wait_for(lambda: worker.running_requests() == 0)


def test_options_becomeflags_of():
    options = {"max_model_len": 8, "lora": False, "sleep": True, "fail": ["a", "b"], "events": None}
    assert flags_of(options) == ["--max-model-len", "8", "--no-lora", "--sleep", "--fail", "a", "--fail", "b"]


@pytest.fixture
def cache_root(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADRACE_REAL_WORKERS", str(tmp_path))
    return tmp_path


def test_a_component_is_installed_once(cache_root):
    runs = []
    for _ in range(2):
        assert cache.ensure("thing", {"version": 1}, runs.append) == cache_root / "thing"
    assert runs == [cache_root / "thing"]


def test_a_changed_recipe_installs_anew_into_an_empty_folder(cache_root):
    cache.ensure("thing", {"version": 1}, lambda folder: (folder / "old").touch())
    cache.ensure("thing", {"version": 2}, lambda folder: (folder / "new").touch())
    assert sorted(path.name for path in (cache_root / "thing").iterdir()) == ["new", "stamp.json"]


def test_a_broken_installation_is_started_over(cache_root):
    def break_off(folder: Path) -> None:
        (folder / "half").touch()
        raise components.InstallFailed("no network")

    with pytest.raises(components.InstallFailed, match="no network"):
        cache.ensure("thing", {"version": 1}, break_off)
    assert not cache.is_installed("thing", {"version": 1})
    cache.ensure("thing", {"version": 1}, lambda folder: (folder / "whole").touch())
    assert not (cache_root / "thing" / "half").exists()


def _install_slowly(folder: Path) -> None:
    with (folder.parent / "runs").open("a") as runs:
        runs.write("run\n")
    time.sleep(0.3)


def _ensure_slow_thing() -> None:
    cache.ensure("thing", {"version": 1}, _install_slowly)


def test_two_processes_at_once_install_once(cache_root):
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_ensure_slow_thing) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=30)
    assert [process.exitcode for process in processes] == [0, 0]
    assert (cache_root / "runs").read_text() == "run\n"


def test_without_an_index_the_reason_is_stated(cache_root, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    components.forget_answers()
    try:
        assert "pip can't find vllm 0.33.0 here" in (workers.why_not("scripted") or "")
    finally:
        components.forget_answers()


def test_every_merge_of_the_tokenizer_joins_tokens_that_exist(tmp_path):
    tiny_model.write(tmp_path)
    model = tiny_model.tokenizer()["model"]
    known = {token for token in model["vocab"] if len(token) == 1}
    for left, right in model["merges"]:
        assert {left, right} <= known
        known.add(left + right)
    assert len(known) + 3 == tiny_model.VOCAB_SIZE


def test_a_rank_and_its_token_determine_each_other():
    ids = [tokens.rank_of(token, around=7, rank=3, vocab_size=11) for token in range(11)]
    assert sorted(ids) == list(range(1, 12))
    assert tokens.rank_of(7, around=7, rank=3, vocab_size=11) == 3
