"""Where calls wait while the workers that could serve them are paused."""

from collections.abc import Callable

import trio

from core.errors import NoWorker
from core.settings import GateSettings


class Gate:
    """Holds calls until the fleet changes in their favour; bounded in number and time."""

    def __init__(self, settings: GateSettings) -> None:
        self._settings = settings
        self._changed = trio.Event()
        #: Calls that wait now.
        self.waiting = 0
        #: Told of each call that leaves, and how long it has waited, in seconds.
        self.waited: Callable[[float], object] = lambda _: None

    def notify(self) -> None:
        """A worker's state has changed, or the rules have: whoever waits looks again."""
        self._changed.set()
        self._changed = trio.Event()

    async def wait_while(self, held: Callable[[], bool]) -> None:
        """Wait until `held()` is false; returns at once, without a checkpoint, when it is.

        Cancellation: the call leaves the gate at once.
        Raises: `NoWorker` when too many wait already, or the wait has lasted too long.
        """
        if not held():
            return
        if self.waiting >= self._settings.max_waiting:
            raise NoWorker(f"the fleet is paused and {self.waiting} calls wait already (gate.max_waiting)")
        self.waiting += 1
        since = trio.current_time()
        try:
            with trio.fail_after(self._settings.timeout):
                while held():
                    await self._changed.wait()
        except trio.TooSlowError as error:
            raise NoWorker(f"the fleet was paused for {self._settings.timeout:g} s (gate.timeout)") from error
        finally:
            self.waiting -= 1
            self.waited(trio.current_time() - since)
