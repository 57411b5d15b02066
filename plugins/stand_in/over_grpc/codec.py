"""Messages to bytes and back, with vLLM's limit and its status for bytes that are no message."""

from typing import Any, TypeVar, cast

from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError, Message
from grpclib.const import Status
from grpclib.encoding.proto import ProtoCodec
from grpclib.exceptions import GRPCError

#: A larger message is refused with OUT_OF_RANGE (vLLM 0.33).
MAX_MESSAGE_BYTES = 32 * 1024 * 1024

_Message = TypeVar("_Message")


class Codec(ProtoCodec):
    """For protobuf's messages and for betterproto2's."""

    def decode(self, data: bytes, message_type: type[_Message]) -> _Message:
        """Raises GRPCError: OUT_OF_RANGE above `MAX_MESSAGE_BYTES`, INTERNAL for anything that doesn't parse."""
        if len(data) > MAX_MESSAGE_BYTES:
            raise GRPCError(Status.OUT_OF_RANGE, f"the message has {len(data)} bytes, the limit is {MAX_MESSAGE_BYTES} bytes")
        try:
            if not issubclass(message_type, Message):
                # betterproto2 takes what is there of a truncated message; protobuf does not, whatever the fields are.
                Empty.FromString(data)
            return cast("_Message", super().decode(data, cast("Any", message_type)))
        except (DecodeError, ValueError, EOFError, LookupError) as error:
            raise GRPCError(Status.INTERNAL, f"failed to decode Protobuf message: {error}") from error
