import msgspec
import pytest

from core.wire.grpc import ChannelLimits


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_connections", 0),
        ("connect_timeout", -1.0),
        ("stream_window", 2**31),
        ("connection_window", 1000),
        ("max_message_bytes", 2**31),
    ],
)
def test_a_limit_that_makes_no_sense_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=f"{field} is {value}"):
        ChannelLimits(**{field: value})


def test_an_unknown_limit_in_a_configuration_is_refused():
    with pytest.raises(msgspec.ValidationError, match="max_streams"):
        msgspec.convert({"max_streams": 5}, ChannelLimits)
