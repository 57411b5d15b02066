"""The sessions that are remembered, with their homes: bounded in number and in time."""

from collections import OrderedDict
from typing import NamedTuple

from core import Role

#: A model's name and the part of a call (`Call.part`): what has a home of its own within a session.
Kind = tuple[str, Role | None]


class Home(NamedTuple):
    """A worker's id, and a data-parallel rank where it has several."""

    worker: str
    rank: int | None


class Session:
    """One session."""

    __slots__ = ("homes", "id", "in_flight", "used")

    def __init__(self, id_: str) -> None:
        self.id = id_
        self.homes: dict[Kind, Home] = {}
        #: Attempts that are on workers now.
        self.in_flight = 0
        #: When an attempt last started or ended, on trio's clock.
        self.used = 0.0


class Sessions:
    """`idle`, in seconds, is how long a session lives without calls; `most` how many there may be."""

    def __init__(self, *, idle: float, most: int) -> None:
        self._idle = idle
        self._most = most
        #: In the order in which they were used, the latest last.
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        #: Sessions that live in each home; nothing is kept of a home without any.
        self.live: dict[tuple[str, int | None], int] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, id_: str, now: float) -> Session | None:
        """A session that isn't over."""
        session = self._sessions.get(id_)
        return None if session is None or self._is_over(session, now) else session

    def start(self, id_: str, kind: Kind, home: Home, now: float) -> Session:
        """An attempt of a session starts; from now on that is its home for calls of that kind."""
        self._forget_idle(now)
        session = self._sessions.get(id_) or Session(id_)
        self._sessions[id_] = session
        self._sessions.move_to_end(id_)
        session.used = now
        session.in_flight += 1
        before = session.homes.get(kind)
        if before != home:
            session.homes[kind] = home
            self.live[home] = self.live.get(home, 0) + 1
            if before:
                self._leave(before)
        if len(self._sessions) > self._most:
            self.forget(next(iter(self._sessions)))
        return session

    def end(self, session: Session, now: float) -> None:
        """An attempt of the session has ended."""
        session.in_flight -= 1
        session.used = now
        if self._sessions.get(session.id) is session:
            self._sessions.move_to_end(session.id)

    def forget(self, id_: str) -> None:
        """A session is over. One that is unknown is, too."""
        if session := self._sessions.pop(id_, None):
            for home in session.homes.values():
                self._leave(home)

    def _leave(self, home: Home) -> None:
        left = self.live.pop(home) - 1
        if left:
            self.live[home] = left

    def _is_over(self, session: Session, now: float) -> bool:
        return not session.in_flight and session.used + self._idle <= now

    def _forget_idle(self, now: float) -> None:
        """Forget those that are over, the first in the order of use. One with calls in flight is being used."""
        while self._sessions:
            session = next(iter(self._sessions.values()))
            if session.used + self._idle > now:
                return
            if session.in_flight:
                session.used = now
                self._sessions.move_to_end(session.id)
            else:
                self.forget(session.id)
