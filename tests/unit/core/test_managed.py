"""Workers' processes: real ones, and short waits between them."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from core.fleet import keeper, managed
from core.fleet.managed import Managed
from core.settings import SettingsError, WorkerSettings, parse_settings
from tests.proxy import wait_for

#: Says that it is there, and stays.
STAY = "import sys, time; print('here', flush=True); time.sleep(600)"
#: As STAY does, and doesn't listen to SIGTERM.
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {STAY}"
#: Starts a STUBBORN one, and ends by SIGTERM.
PARENT = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {STUBBORN!r}]); print(p.pid, flush=True); {STAY}"


@pytest.fixture
def settings(tmp_path: Path) -> Callable[..., WorkerSettings]:
    def make(program: str, **fields: object) -> WorkerSettings:
        given = {"grpc": "127.0.0.1:1", "command": [sys.executable, "-c", program], "output": str(tmp_path / "log"), **fields}
        return WorkerSettings(**given)  # pyright: ignore[reportArgumentType]

    return make


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(managed, "_SHORTEST", 0.01)


async def wait_until(condition: Callable[[], bool]) -> None:
    await trio.to_thread.run_sync(wait_for, condition, 30)


def said(output: str) -> str:
    return Path(output).read_text() if Path(output).exists() else ""


async def has_said(output: str, word: str) -> None:
    await wait_until(lambda: word in said(output))


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def is_gone(pid: int) -> None:
    await wait_until(lambda: not is_there(pid))


def start_keeper(output: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, keeper.__file__, "5", str(output), sys.executable, "-c", STAY]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


async def test_a_process_runs_until_it_is_cancelled_and_its_output_is_kept(settings):
    worker = Managed(settings("import os; print('hello', os.environ['WHO']);" + STAY, environment={"WHO": "you"}), lambda: None)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.run)
        await has_said(worker.process.output, "here")
        pid = worker.process.pid
        assert pid
        assert (worker.process.starts, worker.process.down) == (1, "")
        nursery.cancel_scope.cancel()
    assert not is_there(pid)
    assert said(worker.process.output) == "hello you\nhere\n"


async def test_a_process_that_ends_starts_again_and_its_end_is_told(settings):
    told: list[str] = []
    worker = Managed(settings("print('once', flush=True); raise SystemExit(3)"), lambda: told.append(worker.process.down))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.run)
        await wait_until(lambda: len(told) >= 3)
        nursery.cancel_scope.cancel()
    assert told[:3] == [
        f"its process has ended with status 3, see {worker.process.output}; it starts again in {wait:g} s" for wait in (0.01, 0.02, 0.04)
    ]
    assert worker.process.status == 3


async def test_a_command_that_is_not_there_is_told_by_its_status(settings):
    told = trio.Event()
    worker = Managed(settings("", command=["/there/is/no/such/program"]), told.set)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.run)
        with trio.fail_after(30):
            await told.wait()
        nursery.cancel_scope.cancel()
    assert (worker.process.status, worker.process.pid) == (127, None)


async def test_who_does_not_listen_to_sigterm_is_killed_with_all_that_it_has_started(settings):
    worker = Managed(settings(PARENT, stop_timeout=0.2), lambda: None)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.run)
        await has_said(worker.process.output, "here\nhere")
        child = next(int(line) for line in said(worker.process.output).split() if line.isdigit())
        nursery.cancel_scope.cancel()
    await is_gone(child)


async def test_a_process_ends_when_headrace_has_vanished(tmp_path: Path):
    kept = start_keeper(tmp_path / "log")
    assert kept.stdin
    assert kept.stdout
    with kept.stdin, kept.stdout:
        pid = int(kept.stdout.readline())
        await has_said(str(tmp_path / "log"), "here")
        kept.stdin.close()  # as the kernel does for a process that was killed
        await is_gone(pid)
        assert await trio.to_thread.run_sync(kept.wait, 30) == 128 + signal.SIGTERM


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
async def test_a_process_is_killed_when_its_keeper_is(tmp_path: Path):
    kept = start_keeper(tmp_path / "log")
    assert kept.stdin
    assert kept.stdout
    with kept.stdin, kept.stdout:
        pid = int(kept.stdout.readline())
        await has_said(str(tmp_path / "log"), "here")
        kept.kill()
        await is_gone(pid)
        assert kept.wait(30) == -signal.SIGKILL


def test_a_keeper_does_not_listen_to_the_terminal(settings):
    """It is in a session of its own, so that Ctrl-C ends headrace first, and the engine after the calls."""

    async def session_of() -> tuple[int, int]:
        worker = Managed(settings(STAY), lambda: None)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker.run)
            await has_said(worker.process.output, "here")
            assert worker.process.pid
            sessions = os.getsid(0), os.getsid(worker.process.pid)
            nursery.cancel_scope.cancel()
        return sessions

    mine, its = trio.run(session_of)
    assert mine != its


def test_output_without_a_command_is_refused():
    with pytest.raises(SettingsError, match="environment and output are those of a command, and there is none"):
        parse_settings('[[workers]]\ngrpc = "a:1"\noutput = "x.log"')
