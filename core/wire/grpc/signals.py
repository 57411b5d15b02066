"""Waking one task, without the price of an event or a lock."""

import trio


class Signal:
    """Wakes the one task that waits for it; a wake that nobody waits for is lost.

    So the waiter looks at the state it waits for first, and again when it wakes, with no checkpoint in between.
    """

    __slots__ = ("_task",)

    def __init__(self) -> None:
        self._task: trio.lowlevel.Task | None = None

    def wake(self) -> None:
        """Let the waiting task go on, in this tick's next round."""
        task = self._task
        if task is not None:
            self._task = None
            trio.lowlevel.reschedule(task)

    async def wait(self) -> None:
        """Sleep until `wake`. Cancellation: the wait ends, nothing else changes.

        Raises: `trio.BusyResourceError` when another task waits already.
        """
        if self._task is not None:
            raise trio.BusyResourceError("another task is already waiting here")
        self._task = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(self._abort)

    def _abort(self, _: object) -> trio.lowlevel.Abort:
        self._task = None
        return trio.lowlevel.Abort.SUCCEEDED
