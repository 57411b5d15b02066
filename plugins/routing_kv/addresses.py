"""Whose events come to an address: one engine's, or they would be taken for another's.

Where engines connect to the address that headrace binds, nothing but the topic tells them apart. So each of several that name the same
topic there is followed by nobody, and the second topic of an address that headrace has bound isn't either: a socket of ours that connected
to it would wait for another one of ours for ever.
"""

from typing import Final

import structlog
import trio
from msgspec import Struct, field

from plugins.routing_kv.subscription import Subscription

log = structlog.stdlib.get_logger()

#: Seconds that a worker which has left takes to let go of its address, when it comes back at once.
_HANDOVER: Final = 1.0


class _Claim(Struct, eq=False):
    worker: str
    subscription: Subscription
    #: Of what it follows at this moment.
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    #: Set when another one gives its address back.
    freed: trio.Event = field(default_factory=trio.Event)


class Addresses:
    """Runs subscriptions, each as long as its address is its own."""

    def __init__(self) -> None:
        self._claims: list[_Claim] = []
        #: What headrace has bound. ZeroMQ frees an address some time after its socket was closed.
        self._bound: set[str] = set()

    async def follow(self, worker: str, subscription: Subscription) -> None:
        """Run it until cancelled; while another one has its address, wait, and say so. Raises: `zmq.ZMQError`, see `Subscription.run`."""
        mine = _Claim(worker, subscription)
        for other in self._claims:
            if _same_topic(other, mine):
                other.scope.cancel()
        self._claims.append(mine)
        try:
            while True:
                await self._alone(mine)
                with mine.scope:
                    await self._run(subscription)
                subscription.forget()
        finally:
            self._claims.remove(mine)
            for other in self._claims:
                other.freed.set()

    async def _run(self, subscription: Subscription) -> None:
        endpoint = subscription.source.endpoint
        try:
            await subscription.run(ours=endpoint in self._bound)
        finally:
            if subscription.bound:
                self._bound.add(endpoint)
                subscription.bound = False

    async def _alone(self, mine: _Claim) -> None:
        """Wait until its address is its own."""
        seconds = _HANDOVER
        while other := next((other for other in self._claims if other is not mine and _clash(other, mine)), None):
            mine.freed = trio.Event()
            with trio.move_on_after(seconds) as waiting:
                await mine.freed.wait()
            if waiting.cancelled_caught:
                seconds = float("inf")
                source = mine.subscription.source
                reason = f"the events of {other.worker} come to this address, too: give each engine a port of its own"
                log.error("kv.not_subscribed", worker=mine.worker, rank=source.rank, endpoint=source.endpoint, reason=reason)
        mine.scope = trio.CancelScope()


def _same_topic(one: _Claim, other: _Claim) -> bool:
    a, b = one.subscription.source, other.subscription.source
    return (a.endpoint, a.topic) == (b.endpoint, b.topic)


def _clash(other: _Claim, mine: _Claim) -> bool:
    return _same_topic(other, mine) or (
        other.subscription.bound and other.subscription.source.endpoint == mine.subscription.source.endpoint
    )
