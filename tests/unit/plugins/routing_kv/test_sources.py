"""Where a worker's events are: as it tells, over either wire, or as the settings do."""

from typing import Any

import httpx
import pytest
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from core import Worker, WorkerInfo, WorkerSettings
from core.settings import SettingsError, convert_settings
from core.wire.generated.vllm import GetKvEventSourcesRequest, GetKvEventSourcesResponse, KvEventSource
from plugins.routing_kv import Settings
from plugins.routing_kv.sources import Source, SourceSettings, discover


class Control:
    def __init__(self, *sources: KvEventSource, error: GRPCError | None = None) -> None:
        self._reply, self._error = GetKvEventSourcesResponse(sources=list(sources)), error

    async def get_kv_event_sources(self, message: GetKvEventSourcesRequest) -> GetKvEventSourcesResponse:
        if self._error:
            raise self._error
        return self._reply


def worker_of(control: Control | None = None, http: Any = None, *, grpc: str | None = "10.0.0.5:50051", ranks=(0,)) -> Worker:
    worker = Worker(WorkerSettings(grpc=grpc, http="http://[fd00::5]:8000"))
    worker.info = WorkerInfo(models=("m",), model_id="m", max_model_len=100, ranks=tuple(ranks))
    worker.control = control  # pyright: ignore[reportAttributeAccessIssue]
    if http is not None:
        transport = httpx.MockTransport(lambda _: http)
        worker.http = httpx.AsyncClient(transport=transport, base_url="http://worker")
    return worker


def told(endpoint: str, **members: Any) -> KvEventSource:
    return KvEventSource(**{"transport": "zmq", "endpoint": endpoint, "topic": "kv", **members})


async def test_each_rank_has_a_source_and_a_wildcard_is_the_workers_host():
    control = Control(
        told("tcp://*:5557", replay_endpoint="tcp://*:6557", data_parallel_rank=0), told("tcp://[::]:5558", data_parallel_rank=1)
    )
    assert await discover(worker_of(control)) == [
        Source(0, "tcp://10.0.0.5:5557", "kv", "tcp://10.0.0.5:6557", binds=True),
        Source(1, "tcp://10.0.0.5:5558", "kv", "", binds=True),
    ]


async def test_who_binds_any_other_address_is_not_known():
    assert await discover(worker_of(Control(told("tcp://10.0.0.9:5557")))) == [Source(0, "tcp://10.0.0.9:5557", "kv", "", binds=None)]


async def test_what_is_not_zeromq_is_no_source():
    assert await discover(worker_of(Control(told("tcp://*:5557", transport="null")))) == []


async def test_a_worker_without_the_rpc_or_without_grpc_is_asked_over_http():
    config = {"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": None, "topic": "", "buffer_steps": 10}
    unknown = Control(error=GRPCError(Status.UNIMPLEMENTED))
    reply = httpx.Response(200, json={"1": config, "0": None})
    assert await discover(worker_of(unknown, reply)) == [Source(1, "tcp://10.0.0.5:5557", "", "", binds=True)]
    assert await discover(worker_of(None, reply, grpc=None)) == [Source(1, "tcp://[fd00::5]:5557", "", "", binds=True)]


@pytest.mark.parametrize("reply", [httpx.Response(404), httpx.Response(200, json={})])
async def test_a_worker_that_publishes_nothing_has_no_source(reply):
    assert await discover(worker_of(None, reply, grpc=None)) == []
    assert await discover(worker_of(None, grpc=None)) == []


async def test_a_worker_that_does_not_answer_is_an_error():
    with pytest.raises(GRPCError):
        await discover(worker_of(Control(error=GRPCError(Status.UNAVAILABLE))))
    response = httpx.Response(503, request=httpx.Request("GET", "http://worker"))
    with pytest.raises(httpx.HTTPStatusError):
        await discover(worker_of(None, response, grpc=None))


def test_settings_count_ports_by_rank():
    settings = SourceSettings(endpoint="tcp://*:5557", replay="tcp://10.0.0.9:6000", topic="t")
    assert settings.of(worker_of(ranks=(0, 2))) == [
        Source(0, "tcp://10.0.0.5:5557", "t", "tcp://10.0.0.9:6000", binds=True),
        Source(2, "tcp://10.0.0.5:5559", "t", "tcp://10.0.0.9:6002", binds=True),
    ]


def test_where_we_bind_a_wildcard_stays():
    assert SourceSettings(endpoint="tcp://*:5557", binds=False).of(worker_of()) == [Source(0, "tcp://*:5557", "", "", binds=False)]


@pytest.mark.parametrize(
    "address", ["bogus", "tcp://", "tcp://host", "tcp://host:0", "tcp://host:65536", "tcp://host:http", "http://host:1", "ipc://"]
)
def test_settings_that_name_no_address_are_refused(address):
    for key, section in (("endpoint", {"endpoint": address}), ("replay", {"endpoint": "tcp://h:1", "replay": address})):
        with pytest.raises(SettingsError) as raised:
            convert_settings({"sources": {"a": section}}, Settings, source="headrace.toml", path="plugins.kv")
        assert f"{key}: '{address}': write tcp://host:port or ipc://path" in str(raised.value)
        assert "plugins.kv.sources" in str(raised.value)


def test_settings_take_every_form_of_an_address():
    for address in ("tcp://*:5557", "tcp://[::]:5557", "tcp://[fd00::5]:5557", "ipc:///tmp/events", "tcp://host.example:65535"):
        assert SourceSettings(endpoint=address).endpoint == address
