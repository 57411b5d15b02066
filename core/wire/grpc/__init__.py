"""A gRPC client on trio: grpclib's interface, h2 underneath.

From the wire up: `messages`, `frames` and `headers` know the formats; `protocol` is the state of a connection without
I/O, fed with bytes, giving `events`; `connection` drives it with trio; `pool` has the connections of a worker; an
`exchange` is one RPC, which `stream` and `channel` show to callers.
"""

from grpclib.const import Cardinality, Status
from grpclib.exceptions import GRPCError

from core.wire.grpc.channel import Channel, channel_over, open_channel
from core.wire.grpc.errors import ConnectionLost
from core.wire.grpc.limits import ChannelLimits
from core.wire.grpc.stream import Stream

__all__ = [
    "Cardinality",
    "Channel",
    "ChannelLimits",
    "ConnectionLost",
    "GRPCError",
    "Status",
    "Stream",
    "channel_over",
    "open_channel",
]
