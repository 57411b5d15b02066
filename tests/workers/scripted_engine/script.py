"""Faults on order: which utilities and worker methods fail, and which block."""

import time
from collections import Counter


class Script:
    """What is to go wrong next.

    Names are those of utilities (`pause_generation`, `add_lora`) or of worker methods behind `collective_rpc` (`update_weights`).
    """

    def __init__(self, always_failing: list[str]) -> None:
        self._always_failing = frozenset(always_failing)
        self.reset()

    def reset(self) -> None:
        """Forget every order."""
        self._failures: Counter[str] = Counter()
        self._messages: dict[str, str] = {}
        self._stalls: dict[str, float] = {}

    def fail(self, name: str, times: int = 1, message: str = "scripted failure") -> None:
        """Let the next `times` calls of `name` fail with `message`."""
        self._failures[name] = times
        self._messages[name] = message

    def stall(self, name: str, seconds: float) -> None:
        """Let the next call of `name` block the whole engine, as a collective operation does whose peers don't come."""
        self._stalls[name] = seconds

    def obey(self, name: str) -> None:
        """Do what was ordered for a call of `name`.

        Raises: `RuntimeError` when the call is to fail.
        """
        time.sleep(self._stalls.pop(name, 0))
        if name in self._always_failing:
            raise RuntimeError("scripted failure")
        if self._failures[name]:
            self._failures[name] -= 1
            raise RuntimeError(self._messages[name])
