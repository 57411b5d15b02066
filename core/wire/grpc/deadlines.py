"""Deadlines of many calls with one sleeping task.

A cancel scope in each call would cost more, and couldn't span a `yield` of the generators that stubs make of streams.
"""

import math
from collections.abc import Callable
from heapq import heapify, heappop, heappush

import trio


class Timer:
    """One deadline that was asked for; `cancel` it when it's no longer wanted."""

    __slots__ = ("_at", "_deadlines", "_expire", "_order")

    def __init__(self, deadlines: "Deadlines", at: float, order: int, expire: Callable[[], None]) -> None:
        self._deadlines = deadlines
        self._at = at
        self._order = order
        self._expire: Callable[[], None] | None = expire

    def cancel(self) -> None:
        """Never mind. Nothing happens when it has expired."""
        if self._expire is not None:
            self._expire = None
            self._deadlines.sweep()

    def fire(self) -> None:
        """Expire now, unless cancelled."""
        expire, self._expire = self._expire, None
        if expire is not None:
            expire()

    @property
    def at(self) -> float:
        """The deadline in trio's time."""
        return self._at

    @property
    def live(self) -> bool:
        """Whether it can still expire."""
        return self._expire is not None

    def __lt__(self, other: "Timer") -> bool:
        return (self._at, self._order) < (other._at, other._order)


class Deadlines:
    """Calls functions at their time, while `run` runs."""

    def __init__(self) -> None:
        self._heap: list[Timer] = []
        self._order = 0
        self._dead = 0
        self._scope = trio.CancelScope()

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, at: float, expire: Callable[[], None]) -> Timer:
        """Have `expire` called at `at` (trio's time); it must neither block nor raise."""
        self._order += 1
        timer = Timer(self, at, self._order, expire)
        heappush(self._heap, timer)
        if self._heap[0] is timer:
            self._scope.deadline = at
        return timer

    def sweep(self) -> None:
        """One more timer was cancelled. They leave when they are the majority, or the heap would grow for hours."""
        self._dead += 1
        if self._dead * 2 > len(self._heap) and self._dead > 64:
            self._heap = [timer for timer in self._heap if timer.live]
            heapify(self._heap)
            self._dead = 0

    async def run(self) -> None:
        """Serve for ever. Cancellation: ends it, no deadline expires any more."""
        while True:
            with trio.CancelScope(deadline=self._heap[0].at if self._heap else math.inf) as self._scope:
                await trio.sleep_forever()
            now = trio.current_time()
            while self._heap and self._heap[0].at <= now:
                timer = heappop(self._heap)
                if timer.live:
                    timer.fire()
                else:
                    self._dead -= 1
