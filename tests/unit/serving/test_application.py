"""The application object by itself, on both kinds of loop, with a server of a few lines."""

import asyncio
import os
import subprocess
import sys
from contextlib import asynccontextmanager

import msgspec
import pytest
import trio

from core.serving.application import Application, reason

STARTUP = {"type": "lifespan.startup"}
SHUTDOWN = {"type": "lifespan.shutdown"}


async def answer(scope, receive, send):
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


@asynccontextmanager
async def opened():
    await trio.lowlevel.checkpoint()
    yield answer


@asynccontextmanager
async def broken():
    await trio.lowlevel.checkpoint()
    async with trio.open_nursery():
        raise ValueError("no fleet today")
    yield answer


@pytest.fixture(params=[trio.run, lambda main: asyncio.run(main())], ids=["trio", "asyncio"])
def run(request):
    return request.param


async def call(app, scope, *incoming):
    """One connection whose messages are all there already; what the application sent."""
    messages = list(incoming)
    sent = []

    async def receive():
        return messages.pop(0)

    async def send(message):
        sent.append(message)

    await app({"type": scope}, receive, send)
    return sent


def test_requests_are_answered_between_startup_and_shutdown(run):
    async def main():
        app = Application(opened)
        sent = []

        async def receive():
            if not sent:
                return STARTUP
            assert (await call(app, "http"))[0]["status"] == 204
            return SHUTDOWN

        async def send(message):
            sent.append(message["type"])

        await app({"type": "lifespan"}, receive, send)
        return sent, await call(app, "http")

    sent, after = run(main)
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    assert after[0]["status"] == 503


def test_a_request_without_lifespan_says_what_is_missing(run):
    start, body = run(lambda: call(Application(opened), "http"))
    error = msgspec.json.decode(body["body"])["error"]
    assert (start["status"], error["code"], error["type"]) == (503, 503, "ServiceUnavailableError")
    assert "lifespan" in error["message"]


def test_a_proxy_that_cannot_open_is_a_failed_startup_with_the_cause(run):
    sent = run(lambda: call(Application(broken), "lifespan", STARTUP))
    assert sent == [{"type": "lifespan.startup.failed", "message": "headrace could not start: ValueError: no fleet today"}]


def test_a_websocket_is_closed_before_it_is_accepted(run):
    sent = run(lambda: call(Application(opened), "websocket", {"type": "websocket.connect"}))
    assert sent == [{"type": "websocket.close", "code": 1000}]


def test_an_unknown_scope_is_named(run):
    with pytest.raises(ValueError, match="ASGI scope 'telnet'"):
        run(lambda: call(Application(opened), "telnet"))


def test_a_reason_opens_groups_and_names_each_cause_once():
    error = ExceptionGroup("", [ValueError("a"), ExceptionGroup("", [OSError("b"), ValueError("a")])])
    assert reason(error) == "ValueError: a; OSError: b"


def test_importing_the_entry_point_reads_no_settings():
    environment = {**os.environ, "HEADRACE_CONFIG": "/nowhere"}
    assert subprocess.check_output([sys.executable, "-c", "import core.app"], text=True, env=environment) == ""
