"""What the protocol core tells its driver. In order, and complete: each opened stream gets exactly one `Ended`."""

from grpclib.const import Status
from msgspec import Struct

from core.wire.grpc.headers import HeaderList


class HeadReceived(Struct, frozen=True, gc=False):
    """The reply began; its headers hold the initial metadata."""

    stream_id: int
    headers: HeaderList


class MessageReceived(Struct, frozen=True, gc=False):
    """One whole message, without its framing."""

    stream_id: int
    data: bytes


class Ended(Struct, frozen=True, gc=False):
    """The stream is over, and forgotten by the core.

    `lost`: the transport failed or the peer refused, rather than answered. `unprocessed`: the peer says that it has not
    looked at the call, so that it can be made again.
    """

    stream_id: int
    status: Status
    message: str | None = None
    details: bytes | None = None
    trailers: HeaderList = ()
    lost: bool = False
    unprocessed: bool = False


class SendWindowOpened(Struct, frozen=True, gc=False):
    """More can be sent on this stream; 0: perhaps on any."""

    stream_id: int


class SettingsReceived(Struct, frozen=True, gc=False):
    """The peer's settings came: the connection can be used, or its stream limit changed."""


class PingAnswered(Struct, frozen=True, gc=False):
    """Our PING with these eight bytes came back."""

    payload: bytes


class GoingAway(Struct, frozen=True, gc=False):
    """No new streams on this connection. Those that go on get their own `Ended` later."""

    reason: str


class Broken(Struct, frozen=True, gc=False):
    """The peer broke the protocol. What the core has to send explains it; after that the connection can only be closed.

    Streams still open get no further event: the driver ends them, as it does when the transport fails.
    """

    reason: str


Event = HeadReceived | MessageReceived | Ended | SendWindowOpened | SettingsReceived | PingAnswered | GoingAway | Broken
