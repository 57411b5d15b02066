"""TLS and mutual TLS against a real server (grpcio's), certificates made on the spot."""

import ssl
from pathlib import Path

import grpc
import pytest
import trio
import trustme
from cryptography.hazmat.primitives import serialization

from core.tls import TLSFiles
from core.wire.grpc import ConnectionLost, open_channel
from tests.unit.wire.servers import ECHO, Raw, grpcio_server


class Files:
    """A CA and certificates as PEM files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = trustme.CA()
        self.server = self.authority.issue_cert("localhost", "worker.test")
        client = self.authority.issue_cert("client.test")
        self.ca = self._write("ca.pem", self.authority.cert_pem.bytes())
        self.cert = self._write("cert.pem", b"".join(blob.bytes() for blob in client.cert_chain_pems))
        self.key = self._write("key.pem", client.private_key_pem.bytes())
        self.both = self._write("both.pem", client.private_key_and_cert_chain_pem.bytes())

    def _write(self, name: str, data: bytes) -> str:
        path = self.folder / name
        path.write_bytes(data)
        return str(path)

    def credentials(self, *, mutual: bool) -> grpc.ServerCredentials:
        chain = b"".join(blob.bytes() for blob in self.server.cert_chain_pems)
        return grpc.ssl_server_credentials(
            [(self.server.private_key_pem.bytes(), chain)],
            root_certificates=self.authority.cert_pem.bytes() if mutual else None,
            require_client_auth=mutual,
        )


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return Files(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def port(files):
    with grpcio_server(ECHO, credentials=files.credentials(mutual=False)) as server:
        yield server.port


@pytest.fixture(scope="module")
def mutual_port(files):
    with grpcio_server(ECHO, credentials=files.credentials(mutual=True)) as server:
        yield server.port


async def echo(port: int, tls: TLSFiles, host: str = "localhost") -> bytes:
    async with open_channel(host, port, tls=tls) as channel:
        return await channel.unary("/test.Test/Echo", Raw, Raw(b"secret"))


async def test_a_call_goes_over_tls(files, port):
    assert await echo(port, TLSFiles(ca=files.ca)) == b"secret"


async def test_the_name_in_the_certificate_may_differ_from_the_host(files, port):
    assert await echo(port, TLSFiles(ca=files.ca, server_name="worker.test"), host="127.0.0.1") == b"secret"


async def test_a_certificate_for_another_name_is_refused(files, port):
    with pytest.raises(ConnectionLost, match="certificate"):
        await echo(port, TLSFiles(ca=files.ca, server_name="other.test"))


async def test_a_certificate_of_an_unknown_authority_is_refused(files, port, tmp_path):
    other = tmp_path / "other.pem"
    other.write_bytes(trustme.CA().cert_pem.bytes())
    with pytest.raises(ConnectionLost, match=r"TLS handshake failed.*certificate") as caught:
        await echo(port, TLSFiles(ca=str(other)))
    assert not caught.value.sent


async def test_mutual_tls_shows_our_certificate(files, mutual_port):
    assert await echo(mutual_port, TLSFiles(ca=files.ca, cert=files.cert, key=files.key)) == b"secret"


async def test_certificate_and_key_may_lie_in_one_file(files, mutual_port):
    assert await echo(mutual_port, TLSFiles(ca=files.ca, cert=files.both)) == b"secret"


async def test_without_a_certificate_mutual_tls_fails(files, mutual_port):
    with pytest.raises(ConnectionLost):
        await echo(mutual_port, TLSFiles(ca=files.ca))


async def test_plaintext_to_a_tls_port_fails(port):
    with pytest.raises(ConnectionLost):
        async with open_channel("127.0.0.1", port) as channel:
            await channel.unary("/test.Test/Echo", Raw, Raw(b""))


async def test_a_server_without_http2_is_a_clear_error(files, nursery):
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    files.server.configure_cert(context)
    context.set_alpn_protocols(["http/1.1"])
    (listener,) = await trio.open_ssl_over_tcp_listeners(0, context, host="127.0.0.1")
    assert isinstance(listener.transport_listener, trio.SocketListener)

    async def handshake(stream: trio.SSLStream[trio.SocketStream]) -> None:
        try:
            await stream.do_handshake()
        except trio.BrokenResourceError:
            pass
        finally:
            await trio.aclose_forcefully(stream)

    nursery.start_soon(trio.serve_listeners, handshake, [listener])
    port = listener.transport_listener.socket.getsockname()[1]
    with pytest.raises(ConnectionLost, match=r"HTTP/2 \(ALPN h2\)"):
        await echo(port, TLSFiles(ca=files.ca, server_name="localhost"), host="127.0.0.1")
    nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"ca": "/nowhere/ca.pem"}, r"tls\.ca: there is no file '/nowhere/ca.pem'"),
        ({"key": "/nowhere/key.pem"}, r"tls\.key is set but tls\.cert is not"),
        ({"cert": "/nowhere/cert.pem"}, r"tls\.cert: there is no file"),
    ],
)
async def test_files_that_cannot_be_used_are_named_when_the_channel_is_opened(fields, text):
    with pytest.raises(ValueError, match=text):
        async with open_channel("127.0.0.1", 1, tls=TLSFiles(**fields)):
            raise AssertionError("it opened")


async def test_a_certificate_that_is_none_is_named(tmp_path):
    junk = tmp_path / "junk.pem"
    junk.write_text("not a certificate")
    with pytest.raises(ValueError, match=r"tls\.ca: .*junk\.pem"):
        TLSFiles(ca=str(junk)).context(["h2"])


async def test_a_certificate_and_a_key_that_do_not_belong_together_are_named(files, tmp_path):
    other = tmp_path / "other.pem"
    other.write_bytes(files.server.private_key_pem.bytes())
    with pytest.raises(ValueError, match=r"tls\.cert, tls\.key: .*cert\.pem' and '.*other\.pem' can't be used"):
        TLSFiles(ca=files.ca, cert=files.cert, key=str(other)).context(["h2"])


async def test_an_encrypted_key_is_refused_and_nobody_is_asked_for_its_passphrase(files, tmp_path):
    key = serialization.load_pem_private_key(files.server.private_key_pem.bytes(), None)
    locked = tmp_path / "locked.pem"
    encryption = serialization.BestAvailableEncryption(b"secret")
    locked.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption))
    with pytest.raises(ValueError, match=r"locked\.pem' can't be used"):
        TLSFiles(cert=files.cert, key=str(locked)).context(["h2"])
