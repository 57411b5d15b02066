"""Keys of `sampling_params` that nobody knows.

Prime-RL's rollout clients put everything there that the sampling configuration holds, meant for whichever server.
"""

from typing import Final

import structlog

from core import Call

log = structlog.stdlib.get_logger()

#: Clients choose the keys, so what we remember of them is bounded, in number and in length.
_MAX_REPORTED: Final = 1000
_MAX_SHOWN: Final = 100


class UnknownKeys:
    """Takes them out of calls, and logs each one the first time."""

    def __init__(self) -> None:
        self._reported: set[str] = set()

    def take(self, call: Call) -> None:
        """Let the call go on without the keys that nobody has claimed."""
        for key in call.unclaimed_sampling:
            shown = key[:_MAX_SHOWN]
            if shown not in self._reported and len(self._reported) < _MAX_REPORTED:
                self._reported.add(shown)
                log.warning("sampling_params.ignored", key=shown, id=call.id, reason="nobody knows this key; it is reported once")
        call.unclaimed_sampling.clear()
