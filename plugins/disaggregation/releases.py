"""Hand-offs that nobody takes over, because the call was refused, or what was computed is out of date.

Only a decode call frees the blocks that a prefill keeps, so one is sent for that alone. Where that fails, vLLM frees them when their lease
is over (`kv_lease_duration`).
"""

import math

import structlog
import trio

from core import Call, CallError, Proxy
from plugins.disaggregation.legs import release_call
from plugins.disaggregation.merging import Prefilled

log = structlog.stdlib.get_logger()


class Releases:
    """Has blocks freed, beside the calls. `lease`, in seconds: when a hand-off is as old as that, there is nothing left to free."""

    def __init__(self, proxy: Proxy, lease: float) -> None:
        self._proxy = proxy
        self._lease = lease
        self._send, self._waiting = trio.open_memory_channel[tuple[Call, float]](math.inf)

    def add(self, call: Call, prefilled: Prefilled) -> None:
        """Free the blocks of this hand-off; the call is the one that it was for."""
        worker = self._proxy.fleet.workers.get(prefilled.worker)
        if worker and worker.is_there:
            self._send.send_nowait((release_call(call, prefilled.reply), prefilled.at + self._lease))

    async def run(self) -> None:
        """Until cancelled; what is under way then is left to its lease."""
        async with trio.open_nursery() as nursery:
            async for call, deadline in self._waiting:
                nursery.start_soon(self._release, call, deadline)

    async def _release(self, call: Call, deadline: float) -> None:
        with trio.move_on_at(deadline):
            try:
                await self._proxy.leg(call)
            except CallError as error:
                log.warning("release.failed", id=call.id, status=error.status)
