"""What a connection begins with: h2 as we want it, and the settings that the worker is told."""

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.settings import SettingCodes, Settings

from core.wire.grpc.blocks import RememberingDecoder, RememberingEncoder
from core.wire.grpc.limits import ChannelLimits

MAX_FRAME = 2**20
"""The largest frame that we take. Larger ones would make small replies wait behind them for no gain in speed."""


def new_h2(limits: ChannelLimits) -> H2Connection:
    """h2's client side, nothing sent yet."""
    # Normalising and validating costs a third of a reply. What we read of it, we check ourselves; what we send is ours.
    connection = H2Connection(
        H2Configuration(
            client_side=True,
            header_encoding=None,
            validate_outbound_headers=False,
            normalize_outbound_headers=False,
            validate_inbound_headers=False,
            normalize_inbound_headers=False,
        )
    )
    settings = Settings(
        client=True,
        initial_values={
            SettingCodes.ENABLE_PUSH: 0,
            SettingCodes.INITIAL_WINDOW_SIZE: limits.stream_window,
            SettingCodes.MAX_FRAME_SIZE: MAX_FRAME,
            SettingCodes.MAX_HEADER_LIST_SIZE: limits.max_header_bytes,
        },
    )
    del settings[SettingCodes.ENABLE_CONNECT_PROTOCOL]  # nothing for a client to say
    connection.local_settings = settings
    connection.encoder = RememberingEncoder()
    connection.decoder = RememberingDecoder()
    connection.max_inbound_frame_size = MAX_FRAME
    connection.decoder.max_header_list_size = limits.max_header_bytes
    return connection
