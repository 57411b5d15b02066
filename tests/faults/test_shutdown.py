"""The way down: signals with requests in flight, clients that don't read, proxies that don't close."""

import signal

import pytest
import trio

from tests.unit.serving.hosts import HOSTS, command, launched, receive_until, running


async def noticed(idle):
    """Return when the server has closed this idle connection, as it does at the beginning of its shutdown."""
    with trio.fail_after(20):
        assert await idle.receive_some() == b""


async def idle_connection(host):
    stream = await host.request("/library")
    await receive_until(stream, b"0\r\n\r\n")
    return stream


@pytest.mark.parametrize("name", HOSTS)
async def test_a_request_in_flight_is_finished_after_sigterm(name, tmp_path):
    sign = tmp_path / "finish"
    async with (
        running(name) as host,
        await idle_connection(host) as idle,
        await host.request(f"/until-exists?{sign}") as stream,
    ):
        await receive_until(stream, b"one")
        host.terminate()
        await noticed(idle)
        sign.touch()
        await receive_until(stream, b"two")
        await host.event("closed")
        assert await host.ended() == 0


@pytest.mark.parametrize("name", HOSTS)
async def test_a_request_that_does_not_end_is_cancelled_at_the_limit(name):
    async with running(name, graceful=1) as host, await host.request("/wait?stream") as stream:
        await receive_until(stream, b"one")
        host.terminate()
        await host.event("ended")
        await host.event("closed")
        assert await host.ended() == 0


@pytest.mark.parametrize("name", HOSTS)
async def test_a_client_that_does_not_read_loses_its_call_at_the_limit(name):
    async with running(name, graceful=1) as host, await host.request("/flood?3600"):
        await host.event("flooding")
        host.terminate()
        # Where `send` can't be cancelled, the handler stays and the upstream is released from outside.
        await host.printed("event: (ended|released)")


async def test_a_client_that_does_not_read_does_not_keep_the_process():
    """Hypercorn's own processes are kept: see `core/serving/application.py`."""
    async with running("serve", graceful=1) as host, await host.request("/flood?3600"):
        await host.event("flooding")
        host.terminate()
        await host.event("closed")
        assert await host.ended() == 0


async def test_a_second_signal_ends_requests_at_once():
    async with running("serve", graceful=3600) as host, await idle_connection(host) as idle, await host.request("/wait"):
        await host.event("waiting")
        host.terminate()
        await noticed(idle)
        host.process.send_signal(signal.SIGINT)
        await host.event("ended")
        await host.event("closed")
        assert await host.ended() == 0


async def test_nobody_is_accepted_after_the_first_signal():
    async with running("serve", graceful=3600) as host, await idle_connection(host) as idle, await host.request("/wait"):
        await host.event("waiting")
        host.terminate()
        await noticed(idle)
        with pytest.raises(OSError, match="all attempts to connect"):
            await host.connect()


async def test_a_proxy_that_does_not_close_is_left_standing_with_its_stacks_printed():
    async with launched(command("serve", graceful=1), env={"HOSTED_APP": "stubborn"}) as host:
        await host.printed("listening on")
        host.terminate()
        await host.printed(r"Timeout \(0:00:05\)!")
        assert await host.ended() == 1


async def test_a_signal_during_startup_ends_it():
    async with launched(command("serve"), env={"HOSTED_APP": "slow"}) as host:
        await host.event("opening")
        host.terminate()
        assert await host.ended() == 0
