"""Offers the transports `nccl`, vLLM's native protocol, and `broadcast`, our own.

Both are collective: every rank has to come before the trainer can send anything, so all workers are asked at the same time and nobody is
hurried. `GET /fleet/updates/<id>` says who is still awaited.
"""

from collections.abc import Sequence

from core import WeightTransport, hookimpl
from plugins.weights_nccl.broadcast import BroadcastTransport
from plugins.weights_nccl.native import NativeTransport


class WeightsNccl:
    """The hooks."""

    @hookimpl
    def weight_transports(self) -> Sequence[WeightTransport]:
        """See `core.hookspecs`."""
        return [NativeTransport(), BroadcastTransport()]
