"""Which calls may go on: pausing, sleeping, aborting, dying."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum, auto

from plugins.stand_in.engine.refusal import EngineDead, Paused, Refused

#: How many tokens a call makes before others get a turn, when tokens cost no time.
_RUN = 16


class PauseMode(Enum):
    """What a pause does with the calls that it finds."""

    ABORT = "abort"  #: they end
    WAIT = "wait"  #: they finish first
    KEEP = "keep"  #: they freeze


class _State(Enum):
    RUNNING = auto()
    REFUSING = auto()  #: known calls go on, new ones are refused
    FROZEN = auto()  #: nothing moves; new calls queue


class Entry:
    """One call in the scheduler."""

    def __init__(self, request_id: str, rank: int) -> None:
        self.request_id = request_id
        self.rank = rank
        self.running = False
        self.aborted = False
        self.failure: Refused | None = None
        self.turns = 0
        self.nudge = asyncio.Event()


class Scheduler:
    """The calls of a worker, on whichever rank, and whether they move. `delay` is the time that each token takes, in seconds."""

    def __init__(self, delay: float) -> None:
        self.dead = False
        self.asleep: set[str] = set()
        self._delay = delay
        self._state = _State.RUNNING
        self._entries: set[Entry] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._death_watchers: list[Callable[[], None]] = []

    @property
    def paused(self) -> bool:
        """Whether a pause (or sleep) holds or refuses calls."""
        return self._state is not _State.RUNNING

    @property
    def sleeping(self) -> bool:
        """Whether something is asleep; true while merely paused, too, as vLLM has it."""
        return self.paused or bool(self.asleep)

    def counts(self, rank: int) -> tuple[int, int]:
        """How many calls run on a rank, and how many wait there for their first token."""
        entries = [entry for entry in self._entries if entry.rank == rank]
        running = sum(entry.running for entry in entries)
        return running, len(entries) - running

    @contextmanager
    def enter(self, request_id: str, rank: int) -> Iterator[Entry]:
        """The time that a call spends in the engine. Leaving, by whatever way, takes it out."""
        entry = Entry(request_id, rank)
        self._entries.add(entry)
        self._idle.clear()
        try:
            yield entry
        finally:
            self._take_out(entry)

    async def start(self, entry: Entry) -> bool:
        """Wait until a new call may make its first token. False: it was aborted. Raises `Paused` and `EngineDead`."""
        if self._state is _State.REFUSING:
            raise Paused
        return await self.turn(entry)

    async def turn(self, entry: Entry) -> bool:
        """Wait until a call may make its next token, and let the time pass that it takes. False: it was aborted.

        Raises `EngineDead`, or why the server ends all calls.
        """
        entry.turns += 1
        if self._delay:
            await self._pass_time(entry)
        elif entry.turns % _RUN == 0:
            await asyncio.sleep(0)
        while not (entry.aborted or entry.failure) and self._held:
            entry.nudge.clear()
            await entry.nudge.wait()
        if entry.failure:
            raise entry.failure
        entry.running = True
        return not entry.aborted

    async def pause(self, mode: PauseMode) -> None:
        """Hold or end all calls; returns when the engine is idle.

        Cancellation: while `WAIT` waits for the calls to finish, the engine stays paused.
        """
        self._state = _State.FROZEN if mode is PauseMode.KEEP else _State.REFUSING
        if mode is PauseMode.ABORT:
            self.abort()
        self._nudge_all()
        if mode is PauseMode.WAIT:
            await self._idle.wait()
        if self.dead:
            raise EngineDead

    def resume(self) -> None:
        """Let calls move again, unless something is asleep."""
        self._state = _State.RUNNING
        self._nudge_all()

    def sleep(self, parts: set[str]) -> None:
        """Freeze everything, and put parts (`weights`, `kv_cache`) to sleep. New calls queue."""
        self._state = _State.FROZEN
        self.asleep |= parts

    def wake(self, parts: set[str]) -> None:
        """Wake parts up; once none is asleep, calls move again."""
        self.asleep -= parts
        if not self.asleep:
            self.resume()

    def abort(self, request_ids: set[str] | None = None) -> None:
        """End the calls with these request ids, or all. Unknown ids are fine."""
        for entry in [entry for entry in self._entries if request_ids is None or entry.request_id in request_ids]:
            entry.aborted = True
            entry.nudge.set()
            self._take_out(entry)

    def end_all(self, failure: Refused) -> None:
        """End every call with an error."""
        for entry in list(self._entries):
            entry.failure = failure
            entry.nudge.set()
            self._take_out(entry)

    def die(self) -> None:
        """Crash: every call ends with `EngineDead`, and so does everything that is asked from now on."""
        if not self.dead:
            self.dead = True
            self.end_all(EngineDead())
            for watcher in self._death_watchers:
                watcher()

    def on_death(self, watcher: Callable[[], None]) -> None:
        """Have `watcher` called when the engine dies."""
        self._death_watchers.append(watcher)

    async def idle(self) -> None:
        """Wait until no call is in the engine."""
        await self._idle.wait()

    @property
    def _held(self) -> bool:
        return self._state is _State.FROZEN or bool(self.asleep)

    async def _pass_time(self, entry: Entry) -> None:
        entry.nudge.clear()
        try:
            async with asyncio.timeout(self._delay):
                while not (entry.aborted or entry.failure):
                    await entry.nudge.wait()
                    entry.nudge.clear()
        except TimeoutError:
            pass

    def _nudge_all(self) -> None:
        for entry in self._entries:
            entry.nudge.set()

    def _take_out(self, entry: Entry) -> None:
        self._entries.discard(entry)
        if not self._entries:
            self._idle.set()
