"""Session: calls of one session go to one worker, where their prefix is cached; a new session goes to the worker with the fewest.

For rollouts of many turns. A session is what a client names in `X-Session-ID`; hashing that name would let one worker have many sessions
and thrash its cache while another idles.
"""

from collections.abc import Sequence
from random import Random
from typing import Final

import trio

from core import Call, Choice, PluginSettings, Worker, hookimpl, ranks_for
from plugins.routing_session.sessions import Home, Kind, Session, Sessions

#: In bytes of UTF-8; a longer id is no session's. `POST /finish_session` refuses it.
MAX_ID: Final = 256


class Settings(PluginSettings, frozen=True):
    """`[plugins.session]`."""

    #: A session without calls for so long, in seconds, is forgotten.
    idle: float = 7200.0
    #: So many sessions are remembered; of more, those that were idle for longest are forgotten.
    max_sessions: int = 100_000

    def __post_init__(self) -> None:
        if self.idle <= 0:
            raise ValueError("idle: a number of seconds above 0")
        if self.max_sessions < 1:
            raise ValueError("max_sessions: a number from 1")


class SessionRouting:
    """A session's home is where its last call went, whichever policy has chosen that. Calls without one are left to the next policy."""

    settings_type = Settings
    passes = "calls without a session (X-Session-ID, or session_id in the body)"

    def __init__(self, settings: Settings) -> None:
        self._sessions = Sessions(idle=settings.idle, most=settings.max_sessions)
        #: The session of a call's attempt, by the call's identity: one call has one attempt at a time.
        self._attempts: dict[int, Session] = {}
        self._random = Random()  # noqa: S311 - nobody gains by guessing it

    @hookimpl
    def choose_worker(self, call: Call, workers: Sequence[Worker]) -> Choice | None:
        """See `core.hookspecs`."""
        if not _is_session(call.session_id):
            return None
        session = self._sessions.get(call.session_id, trio.current_time())
        home = session.homes.get(_kind(call)) if session else None
        if home is None:
            return self._fewest(call, workers, "new")
        for worker in workers:
            if worker.id == home.worker and (home.rank is None or home.rank in ranks_for(call, worker)):
                return Choice(worker, "session: its worker", home.rank)
        return self._fewest(call, workers, f"{home.worker} can't take it")

    @hookimpl
    def attempt_started(self, call: Call, choice: Choice) -> None:
        """See `core.hookspecs`."""
        if _is_session(call.session_id):
            home = Home(choice.worker.id, choice.rank)
            self._attempts[id(call)] = self._sessions.start(call.session_id, _kind(call), home, trio.current_time())

    @hookimpl
    def attempt_ended(self, call: Call) -> None:
        """See `core.hookspecs`."""
        if session := self._attempts.pop(id(call), None):
            self._sessions.end(session, trio.current_time())

    @hookimpl
    def session_finished(self, session_id: str) -> None:
        """See `core.hookspecs`."""
        self._sessions.forget(session_id)

    def _fewest(self, call: Call, workers: Sequence[Worker], why: str) -> Choice:
        slots = [(worker, rank) for worker in workers for rank in ranks_for(call, worker)]
        live = self._sessions.live
        counts = [live.get((worker.id, rank), 0) for worker, rank in slots]
        fewest = min(counts)
        worker, rank = self._random.choice([slot for slot, count in zip(slots, counts, strict=True) if count == fewest])
        return Choice(worker, f"session: {why}; fewest here, {fewest:,}", rank)


def _is_session(session_id: str) -> bool:
    return bool(session_id) and len(session_id) <= MAX_ID and (session_id.isascii() or len(session_id.encode()) <= MAX_ID)


def _kind(call: Call) -> Kind:
    """Calls of one session for several models, or for a prefill and a decode worker, have a home each."""
    return call.model, call.part
