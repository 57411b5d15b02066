"""A headrace in front of each worker, started once for all tests, and clients of it."""

from collections.abc import Iterator

import httpx
import pytest

from tests.proxy import RunningProxy, headrace
from tests.workers import RunningWorker

#: So that what happens to a worker is soon known.
PROBES = "[probe]\ninterval = 0.1\n"
#: The path alone, without the plugins that refuse replies which a trainer could not use.
BARE = f'{PROBES}[plugins]\ndisable = ["prime-rl", "routed-experts"]\n'


@pytest.fixture(scope="session")
def proxy(worker: RunningWorker) -> Iterator[RunningProxy]:
    """In front of each worker in turn, over both wires."""
    with headrace(worker, settings=PROBES) as proxy:
        yield proxy


@pytest.fixture(scope="session")
def scripted_proxy(scripted_worker: RunningWorker) -> Iterator[RunningProxy]:
    """In front of the scripted worker, over both wires."""
    with headrace(scripted_worker, settings=BARE) as proxy:
        yield proxy


@pytest.fixture(scope="session")
def over_grpc(scripted_worker: RunningWorker) -> Iterator[RunningProxy]:
    """In front of the scripted worker, of whose HTTP server it isn't told."""
    with headrace(scripted_worker, wires="grpc", settings=BARE) as proxy:
        yield proxy


@pytest.fixture(scope="session")
def over_http(scripted_worker: RunningWorker) -> Iterator[RunningProxy]:
    """In front of the scripted worker, of whose gRPC server it isn't told."""
    with headrace(scripted_worker, wires="http", settings=BARE) as proxy:
        yield proxy


def client_of(proxy: RunningProxy) -> httpx.Client:
    """A client whose calls go to this headrace."""
    return httpx.Client(base_url=proxy.url, timeout=60, trust_env=False)


@pytest.fixture
def client(proxy: RunningProxy) -> Iterator[httpx.Client]:
    with client_of(proxy) as client:
        yield client


@pytest.fixture
def scripted_client(scripted_proxy: RunningProxy) -> Iterator[httpx.Client]:
    with client_of(scripted_proxy) as client:
        yield client
