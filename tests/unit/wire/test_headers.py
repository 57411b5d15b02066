import pytest
from grpclib.const import Status
from hpack import NeverIndexedHeaderTuple

from core.wire.grpc.headers import decode_metadata, encode_metadata, encode_timeout, refusal, verdict


@pytest.mark.parametrize(
    ("seconds", "value"),
    [
        (0, b"1m"),
        (-1, b"1m"),
        (0.0001, b"1m"),
        (1.0001, b"1001m"),
        (30, b"30000m"),
        (99_999.999, b"99999999m"),
        (100_000, b"100000S"),
        (10**12, b"99999999S"),
    ],
)
def test_a_timeout_is_rounded_up_and_has_at_most_eight_digits(seconds, value):
    assert encode_timeout(seconds) == (b"grpc-timeout", value)


def test_metadata_stays_out_of_the_compression_tables():
    (header,) = encode_metadata({"authorization": "secret"})
    assert isinstance(header, NeverIndexedHeaderTuple)


def test_binary_metadata_is_base64_without_padding():
    assert encode_metadata([("a-bin", b"\0")]) == [(b"a-bin", b"AA")]


@pytest.mark.parametrize(
    ("metadata", "error"),
    [
        ({"grpc-x": "1"}, ValueError),
        ({"Upper": "1"}, ValueError),
        ({"a": "ü"}, ValueError),
        ({"a": b"1"}, TypeError),
        ({"a-bin": "1"}, TypeError),
    ],
)
def test_metadata_that_cannot_be_sent_is_an_error(metadata, error):
    with pytest.raises(error):
        encode_metadata(metadata)


@pytest.mark.parametrize("text", [b"AAE", b"AAE="])
def test_binary_metadata_is_read_with_and_without_padding(text):
    assert decode_metadata([(b"a-bin", text)])["a-bin"] == b"\0\1"


def test_several_binary_values_may_share_a_header():
    assert decode_metadata([(b"a-bin", b"AA,AQ")]).getall("a-bin") == [b"\0", b"\1"]


def test_binary_metadata_that_is_no_base64_stays_text():
    assert decode_metadata([(b"a-bin", b"*")])["a-bin"] == "*"


def test_fields_of_http_and_grpc_are_no_metadata():
    headers = [(b":status", b"200"), (b"grpc-status", b"0"), (b"content-type", b"x"), (b"k", b"v"), (b"k", b"w")]
    assert list(decode_metadata(headers).items()) == [("k", "v"), ("k", "w")]


@pytest.mark.parametrize(
    ("http", "status"),
    [
        (b"400", Status.INTERNAL),
        (b"401", Status.UNAUTHENTICATED),
        (b"403", Status.PERMISSION_DENIED),
        (b"404", Status.UNIMPLEMENTED),
        (b"429", Status.UNAVAILABLE),
        (b"500", Status.UNKNOWN),
        (b"503", Status.UNAVAILABLE),
    ],
)
def test_an_http_status_maps_to_a_grpc_status(http, status):
    refused = refusal([(b":status", http)])
    assert refused is not None
    assert refused.status is status
    assert http.decode() in (refused.message or "")


def test_a_grpc_status_wins_over_the_http_status():
    refused = refusal([(b":status", b"503"), (b"grpc-status", b"5")])
    assert refused is not None
    assert refused.status is Status.NOT_FOUND


def test_another_content_type_is_no_grpc():
    refused = refusal([(b":status", b"200"), (b"content-type", b"text/html")])
    assert refused is not None
    assert refused.status is Status.UNKNOWN
    assert "text/html" in (refused.message or "")


def test_a_reply_without_a_status_line_is_refused():
    refused = refusal([(b"content-type", b"application/grpc")])
    assert refused is not None
    assert refused.status is Status.INTERNAL


@pytest.mark.parametrize("kind", [b"application/grpc", b"application/grpc+proto"])
def test_grpc_is_accepted(kind):
    assert refusal([(b":status", b"200"), (b"content-type", kind)]) is None


def test_a_missing_grpc_status_is_unknown():
    assert verdict([]).status is Status.UNKNOWN
    assert "without grpc-status" in (verdict([]).message or "")


@pytest.mark.parametrize("code", [b"17", b"-1", b"", b"zero", b"\xff"])
def test_a_grpc_status_that_is_none_is_unknown(code):
    ending = verdict([(b"grpc-status", code)])
    assert ending.status is Status.UNKNOWN
    assert "grpc-status" in (ending.message or "")


def test_the_text_is_percent_decoded():
    ending = verdict([(b"grpc-status", b"13"), (b"grpc-message", b"caf%C3%A9 100% %ff")])
    assert ending.message == "café 100% \ufffd"
