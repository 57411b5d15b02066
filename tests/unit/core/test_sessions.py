"""The end of a session: whoever keeps something for it is told, whichever plugins there are."""

import pytest

from core import hookimpl
from core.proxy import Proxy
from core.registry import Loaded, Registry
from core.settings import Settings
from plugins.routing_round_robin import RoundRobin
from tests.unit.core.rig import Browser


class Sessions:
    def __init__(self) -> None:
        self.finished: list[str] = []

    @hookimpl
    def session_finished(self, session_id: str) -> None:
        self.finished.append(session_id)


@pytest.fixture
def finishing():
    """Asks the route of a headrace with no other plugin than the one that listens, which comes with it."""
    sessions = Sessions()
    proxy = Proxy(Settings(), Registry([Loaded("round-robin", RoundRobin()), Loaded("sessions", sessions)], ["round-robin"]))

    async def finish(query: str) -> Browser:
        browser = Browser(b"", path="/finish_session", query=query)
        await proxy.asgi(browser.scope, browser.receive, browser.send)
        return browser

    return finish, sessions


async def test_the_end_of_a_session_is_told_to_every_plugin_and_may_be_repeated(finishing):
    finish, sessions = finishing
    replies = [await finish("session_id=trace-1") for _ in range(2)]
    assert [(reply.status, reply.json) for reply in replies] == [(200, {"status": "ok"})] * 2
    assert sessions.finished == ["trace-1", "trace-1"]


@pytest.mark.parametrize("query", ["", "session_id=", "session=trace-1", f"session_id={'%C3%BC' * 129}"])
async def test_the_end_of_no_session_is_refused(finishing, query):
    finish, sessions = finishing
    refused = await finish(query)
    assert (refused.status, refused.json["error"]["param"]) == (400, "session_id")
    assert sessions.finished == []
    assert (await finish(f"session_id={'%C3%BC' * 128}")).status == 200
