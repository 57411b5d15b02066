"""What a channel may use: streams, connections, bytes and seconds."""

from msgspec import Struct

MIB = 2**20
_LARGEST_WINDOW = 2**31 - 1


class ChannelLimits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds and times of one channel. Sizes are bytes, times are seconds.

    Raises: `ValueError` that names the field, when a value makes no sense.
    """

    #: Open calls on one connection before another connection is opened. Opening a stream costs time in proportion to
    #: the streams already open (h2 counts them each time), and what kills a connection kills its calls.
    streams_per_connection: int = 100
    #: Calls, over its whole life, after which a connection gives way to a new one: h2 remembers every stream that has been,
    #: up to 65,536 of them.
    calls_per_connection: int = 8192
    #: Connections to the worker. When all are full, calls go on top, as far as the worker allows, and then wait.
    max_connections: int = 32
    #: The largest message, each way. A reply over it ends its call with RESOURCE_EXHAUSTED.
    max_message_bytes: int = 64 * MIB
    #: The largest header list of a reply. More is an error of the connection, and of every call on it: what follows can't be
    #: decoded. vLLM quotes each token that it refuses in the status message, so this has to hold a whole prompt in words.
    max_header_bytes: int = 16 * MIB
    #: What a worker may send on one call before somebody takes its messages.
    stream_window: int = 16 * MIB
    #: What a worker may send on one connection ahead of its arrival here. Credit is returned as data arrives, so that
    #: a call nobody reads stalls only itself.
    connection_window: int = 64 * MIB
    #: For one attempt to connect: name, TCP, TLS and the worker's HTTP/2 settings.
    connect_timeout: float = 5.0
    #: Silence, while calls are open, after which the worker is asked whether it is there (PING).
    keepalive_interval: float = 60.0
    #: How long the worker has to answer that before the connection counts as lost.
    keepalive_timeout: float = 20.0
    #: A connection without calls is closed after this time.
    idle_timeout: float = 300.0
    #: Pause after the first failed attempt to connect; doubled by each further one, with ±20 % of jitter.
    reconnect_delay: float = 0.1
    #: The longest such pause.
    reconnect_delay_max: float = 5.0
    #: How long the end of the channel may take: last frames, TLS's goodbye.
    close_timeout: float = 1.0

    def __post_init__(self) -> None:
        for field in self.__struct_fields__:
            value = getattr(self, field)
            if not value > 0:
                raise ValueError(f"{field} is {value!r}; it must be more than 0")
        for field in ("stream_window", "connection_window", "max_message_bytes"):
            value = getattr(self, field)
            if value > _LARGEST_WINDOW:
                raise ValueError(f"{field} is {value}; the largest is {_LARGEST_WINDOW}")
        if self.connection_window < 65_535:
            raise ValueError(f"connection_window is {self.connection_window}; HTTP/2 starts with 65535")


DEFAULT_LIMITS = ChannelLimits()
