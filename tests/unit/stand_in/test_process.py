"""The process: its ready line, its ends, and the trio side that runs it."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
import trio

from plugins.stand_in import process as stand_in_module
from plugins.stand_in.process import StandInAddress, StandInFailed, stand_in_process

COMMAND = [sys.executable, "-m", "plugins.stand_in"]


@contextmanager
def started(*arguments: str) -> "Iterator[tuple[subprocess.Popen[str], dict[str, int]]]":
    with subprocess.Popen([*COMMAND, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, json.loads(process.stdout.readline())
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_process_without_a_word(number):
    with started() as (process, ready):
        assert ready["pid"] == process.pid
        assert httpx.get(f"http://{ready['host']}:{ready['http_port']}/health").status_code == 200
        process.send_signal(number)
        rest, _ = process.communicate(timeout=10)
        assert (process.returncode, rest) == (0, "")


def test_the_end_of_stdin_ends_the_process_when_it_was_asked_to():
    with started("--exit-with-parent") as (process, _):
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(timeout=10) == 0


def test_a_port_that_is_taken_is_an_error_that_names_the_address():
    with started() as (_, ready):
        done = subprocess.run([*COMMAND, "--http-port", str(ready["http_port"])], check=False, capture_output=True, text=True, timeout=20)
        assert done.returncode == 1
        assert "127.0.0.1" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(["--eos-token-id", "32000"], "--eos-token-id"), (["--vocab-size", "10"], "--vocab-size"), (["--colour"], "--colour")],
)
def test_a_wrong_option_is_named(arguments, named):
    done = subprocess.run([*COMMAND, *arguments], check=False, capture_output=True, text=True, timeout=20)
    assert done.returncode == 2
    assert named in done.stderr


async def test_a_stand_in_lives_as_long_as_its_block():
    async with stand_in_process("--model", "mine", "--vocab-size", "300") as address:
        async with httpx.AsyncClient() as client:
            models = (await client.get(f"{address.http}/v1/models")).json()
        assert models["data"][0]["id"] == "mine"
        stream = await trio.open_tcp_stream(address.host, address.grpc_port)
        await stream.aclose()
    with pytest.raises(OSError, match=str(address.http_port)):
        await trio.open_tcp_stream(address.host, address.http_port)


async def test_a_cancelled_block_ends_its_stand_in():
    seen: list[StandInAddress] = []

    async def hold():
        async with stand_in_process() as address:
            seen.append(address)
            nursery.cancel_scope.cancel()
            await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(hold)
    with pytest.raises(OSError, match=str(seen[0].http_port)):
        await trio.open_tcp_stream(seen[0].host, seen[0].http_port)


async def test_a_stand_in_that_ends_before_it_is_ready_is_an_error_with_its_status():
    with pytest.raises(StandInFailed, match="status 2"):
        async with stand_in_process("--vocab-size", "10"):
            pass


async def test_a_stand_in_that_says_nothing_is_given_up(monkeypatch):
    monkeypatch.setattr(stand_in_module, "START_DEADLINE", 0.0)
    with pytest.raises(StandInFailed, match="not ready within 0 s"):
        async with stand_in_process():
            pass


async def test_a_stand_in_that_does_not_end_is_killed(monkeypatch):
    monkeypatch.setattr(stand_in_module, "STOP_DEADLINE", 0.0)
    async with stand_in_process("--shutdown-timeout", "100") as address:
        pass
    with pytest.raises(OSError, match=str(address.http_port)):
        await trio.open_tcp_stream(address.host, address.http_port)


def test_an_ipv6_address_is_written_in_brackets():
    address = StandInAddress("::1", 1, 2, 3)
    assert (address.grpc, address.http) == ("[::1]:1", "http://[::1]:2")
