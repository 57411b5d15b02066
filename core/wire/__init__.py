"""How workers are spoken to: the gRPC channel, and the lanes on top of it."""

from core.wire.grpc import (
    Cardinality,
    Channel,
    ChannelLimits,
    ConnectionLost,
    GRPCError,
    Status,
    Stream,
    open_channel,
)

__all__ = [
    "Cardinality",
    "Channel",
    "ChannelLimits",
    "ConnectionLost",
    "GRPCError",
    "Status",
    "Stream",
    "open_channel",
]
