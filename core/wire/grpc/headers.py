"""Header lists of gRPC: what a call sends, and what a reply's headers and trailers mean."""

import binascii
import math
from base64 import b64decode
from collections.abc import Collection, Mapping, Sequence
from importlib.metadata import version
from urllib.parse import unquote

from grpclib.const import Status
from grpclib.metadata import encode_metadata as encode_pairs
from hpack import NeverIndexedHeaderTuple
from msgspec import Struct
from multidict import MultiDict

HeaderList = Sequence[tuple[bytes, bytes]]
MetadataLike = Mapping[str, str | bytes] | Collection[tuple[str, str | bytes]]

USER_AGENT = f"grpc-python-headrace/{version('headrace')}"

_OURS = frozenset({b"content-type", b"te", b"user-agent"})
_LONGEST_IN_MS = 99_999_999

# https://github.com/grpc/grpc/blob/master/doc/http-grpc-status-mapping.md
_OF_HTTP = {
    b"400": Status.INTERNAL,
    b"401": Status.UNAUTHENTICATED,
    b"403": Status.PERMISSION_DENIED,
    b"404": Status.UNIMPLEMENTED,
    b"429": Status.UNAVAILABLE,
    b"502": Status.UNAVAILABLE,
    b"503": Status.UNAVAILABLE,
    b"504": Status.UNAVAILABLE,
}
_STATUS = {str(status.value).encode(): status for status in Status}


class Verdict(Struct, frozen=True):
    """How a reply ended: a status, the server's text, and `grpc-status-details-bin` as bytes."""

    status: Status
    message: str | None = None
    details: bytes | None = None


def request_headers(path: str, authority: str, scheme: str) -> list[tuple[bytes, bytes]]:
    """What every call of one method sends, before `grpc-timeout` and metadata."""
    return [
        (b":method", b"POST"),
        (b":scheme", scheme.encode()),
        (b":path", path.encode()),
        (b":authority", authority.encode()),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
        (b"user-agent", USER_AGENT.encode()),
    ]


def encode_metadata(metadata: MetadataLike) -> list[tuple[bytes, bytes]]:
    """Metadata as headers, outside of the compression tables: they may be secret, and rarely repeat.

    Raises: `ValueError` for a key or value that can't be sent, `TypeError` unless `-bin` goes with bytes.
    """
    return [NeverIndexedHeaderTuple(key.encode(), value.encode()) for key, value in encode_pairs(metadata)]


def encode_timeout(seconds: float) -> tuple[bytes, bytes]:
    """The `grpc-timeout` header: rounded up, in milliseconds as far as eight digits go (27 hours)."""
    milliseconds = max(1, math.ceil(seconds * 1000))
    value = f"{milliseconds}m" if milliseconds <= _LONGEST_IN_MS else f"{min(math.ceil(seconds), _LONGEST_IN_MS)}S"
    return NeverIndexedHeaderTuple(b"grpc-timeout", value.encode())


def refusal(headers: HeaderList) -> Verdict | None:
    """What is wrong with the headers a reply starts with; None: it is gRPC.

    A `grpc-status` among them wins over the HTTP status, as gRPC has it.
    """
    fields = dict(headers)
    http = fields.get(b":status")
    if http is None:
        return Verdict(Status.INTERNAL, "the reply has no :status")
    if http != b"200":
        if b"grpc-status" in fields:
            return verdict(headers)
        return Verdict(_OF_HTTP.get(http, Status.UNKNOWN), f"the reply is HTTP {_text(http)}, and not gRPC")
    kind = fields.get(b"content-type", b"")
    if not kind.startswith(b"application/grpc"):
        return Verdict(Status.UNKNOWN, f"the reply's content-type is {_text(kind)!r}, not 'application/grpc'")
    return None


def verdict(headers: HeaderList) -> Verdict:
    """The end of a call, from trailers (or from the only headers of a reply)."""
    fields = dict(headers)
    code = fields.get(b"grpc-status")
    if code is None:
        return Verdict(Status.UNKNOWN, "the reply ended without grpc-status")
    status = _STATUS.get(code)
    if status is None:
        return Verdict(Status.UNKNOWN, f"the reply's grpc-status is {_text(code)!r}, which is none")
    if status is Status.OK:
        return _OK
    message = fields.get(b"grpc-message")
    details = fields.get(b"grpc-status-details-bin")
    return Verdict(
        status,
        None if message is None else unquote(_text(message), errors="replace"),
        None if details is None else _binary(details),
    )


def decode_metadata(headers: HeaderList) -> MultiDict[str | bytes]:
    """The reply's own metadata: without HTTP's and gRPC's fields; `-bin` values as bytes.

    A `-bin` value that is no base64 is left as the text that came.
    """
    metadata: MultiDict[str | bytes] = MultiDict()
    for key, value in headers:
        if key.startswith((b":", b"grpc-")) or key in _OURS:
            continue
        if key.endswith(b"-bin"):
            for part in value.split(b","):
                decoded = _binary(part)
                metadata.add(_text(key), _text(part) if decoded is None else decoded)
        else:
            metadata.add(_text(key), _text(value))
    return metadata


def _binary(value: bytes) -> bytes | None:
    try:
        return b64decode(value + b"=" * (-len(value) % 4), validate=True)
    except binascii.Error:
        return None


def _text(value: bytes) -> str:
    return value.decode("utf-8", "replace")


_OK = Verdict(Status.OK)
