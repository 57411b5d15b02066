"""A worker's connections as its settings have them: TLS over HTTP."""

import ssl
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import trustme

from core.fleet.connection import connect
from core.fleet.probe import ProbeFailed, Report
from core.settings import WorkerSettings
from core.tls import TLSFiles
from tests.unit.core.upstream import Upstream, response


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def ca(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("tls") / "ca.pem"
    authority.cert_pem.write_to_path(str(path))
    return str(path)


@asynccontextmanager
async def https_server(authority: trustme.CA, name: str) -> AsyncGenerator[str, None]:
    """A server that answers `{}`, with a certificate for this name; yields its URL."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert(name).configure_cert(context)
    [listener] = await trio.open_ssl_over_tcp_listeners(0, context, host="127.0.0.1", https_compatible=True)

    assert isinstance(listener.transport_listener, trio.SocketListener)
    port = listener.transport_listener.socket.getsockname()[1]

    async def serve(stream: trio.SSLStream[trio.SocketStream]) -> None:
        try:
            await Upstream([response(b"{}")]).handle(stream)
        except trio.BrokenResourceError:  # the client didn't like it
            await trio.aclose_forcefully(stream)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, serve, [listener])
        yield f"https://127.0.0.1:{port}"
        nursery.cancel_scope.cancel()


async def check(url: str, tls: TLSFiles) -> Report:
    async with connect(WorkerSettings(http=url, tls=tls)) as connection:
        return await connection.probe.check()


@pytest.mark.parametrize("server_name", [None, "worker.test"])
async def test_the_name_in_the_certificate_of_an_http_server_may_differ_from_the_host(authority, ca, server_name):
    async with https_server(authority, server_name or "127.0.0.1") as url:
        assert await check(url, TLSFiles(ca=ca, server_name=server_name)) == Report(paused=False, policy_version=None)


@pytest.mark.parametrize("server_name", [None, "other.test"])
async def test_a_certificate_for_another_name_is_refused_with_what_is_wrong(authority, ca, server_name):
    async with https_server(authority, "worker.test") as url:
        with pytest.raises(ProbeFailed, match=r"ConnectError: .*certificate verify failed: .* mismatch"):
            await check(url, TLSFiles(ca=ca, server_name=server_name))
