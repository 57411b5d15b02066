"""Errors of the gRPC channel: grpclib's own, and one that says what a lost connection means for the call."""

from grpclib.const import Status
from grpclib.exceptions import GRPCError


class ConnectionLost(GRPCError):
    """The transport failed under a call: refused, reset, closed, or told to go away. Its status is UNAVAILABLE.

    `sent` says whether the worker can have begun to process the call. When it is `False` the call can be made again
    without a risk of running twice.
    """

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(Status.UNAVAILABLE, message)
        self.sent = sent

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (self.message, self.sent)


def _rebuild(message: str, sent: bool) -> ConnectionLost:
    return ConnectionLost(message, sent=sent)
