"""The offset that every bridged turn carries.

From a rollout's second turn on, Prime-RL's clients send `sampling_params.routed_experts_prompt_start`: how many rows of routing they have
already, should the engine capture any. It is no wish for them, and most models have none. Taken for one, it would keep the turn from
gRPC, which can't carry it, and make an error of the rows that aren't there.
"""

from typing import Final

import structlog

from core import OVER_HTTP, Call

log = structlog.stdlib.get_logger()

_NEED: Final = "sampling_params.routed_experts_prompt_start"


class BridgedTurns:
    """Takes the offset out of calls that ask for no routed experts, and logs that once."""

    def __init__(self) -> None:
        self._reported = False

    def take(self, call: Call) -> None:
        """For after `receive_call` of the others: who was asked for routed experts has sent the call over HTTP, and needs the offset."""
        if OVER_HTTP in call.needs:
            return
        call.sampling.routed_experts_prompt_start = None
        call.needs.discard(_NEED)
        if not self._reported:
            self._reported = True
            log.info(
                "sampling_params.ignored",
                key="routed_experts_prompt_start",
                id=call.id,
                reason="nothing asks for routed experts: neither the call nor plugins.routed-experts.always",
            )
