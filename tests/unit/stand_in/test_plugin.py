"""The plugin: wrong settings keep headrace from starting, and a process that can't start is one worker less."""

import json

import pytest
import trio
from structlog.testing import capture_logs

from core import NoWorker, Worker, hookimpl
from core import proxy as proxy_module
from core.proxy import open_proxy
from core.registry import Loaded, Registry
from core.settings import Settings as HeadraceSettings
from core.settings import SettingsError, convert_settings
from core.testing import make_call
from plugins.routing_round_robin import RoundRobin
from plugins.stand_in import Settings, StandIn
from tests.proxy import wait_for
from tests.workers.processes import free_ports

ALLOWED = "; `python -m plugins.stand_in --help` shows what is allowed"


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"workers": 0}, ".workers: Expected `int` >= 1"),
        ({"arguments": ["--block-size", "0"]}, f": arguments: Invalid value for '--block-size': 0 is not in the range x>=1{ALLOWED}"),
        ({"arguments": ["--block-size"]}, f": arguments: Option '--block-size' requires an argument{ALLOWED}"),
        ({"arguments": ["more"]}, f": arguments: Got unexpected extra argument (more){ALLOWED}"),
        (
            {"arguments": ["--kv-events-config", '{"hwm": "1"}']},
            f": arguments: Invalid value for --kv-events-config: Expected `int`, got `str` at `.hwm`{ALLOWED}",
        ),
        (
            {"arguments": ["--eos-token-id", "32000"]},
            f": arguments: Invalid value for --eos-token-id: must be below --vocab-size, 32000{ALLOWED}",
        ),
        ({"workers": 2, "arguments": ["--grpc-port", "5"]}, ": arguments: 2 workers can't share a port; leave the ports out"),
    ],
)
def test_what_the_process_would_not_take_is_an_error_of_the_settings(section, expected):
    with pytest.raises(SettingsError) as raised:
        convert_settings(section, Settings, source="headrace.toml", path="plugins.stand-in")
    assert str(raised.value) == f"headrace.toml: plugins.stand-in{expected}"


@pytest.mark.parametrize("option", ["--help", "--token-dely"])
def test_an_option_that_is_none_is_named_and_nothing_is_printed(option, capsys):
    with pytest.raises(SettingsError, match=rf"arguments: No such option.* '?{option}.*{ALLOWED[2:]}"):
        convert_settings({"arguments": [option, "1"]}, Settings, source="headrace.toml", path="plugins.stand-in")
    assert capsys.readouterr().out == ""


class Joining:
    def __init__(self) -> None:
        self.joined = trio.Event()

    @hookimpl
    def worker_joined(self, worker: Worker) -> None:
        self.joined.set()


async def test_a_process_that_cannot_start_is_named_in_one_line_and_the_others_serve(monkeypatch):
    monkeypatch.setattr(proxy_module, "configure_log", lambda _: None)
    [port] = free_ports(1)
    events = json.dumps({"enable_kv_cache_events": True, "endpoint": f"tcp://*:{port}"})
    joining, stand_in = Joining(), StandIn(Settings(workers=2, arguments=["--kv-events-config", events]))
    registry = Registry([Loaded("round-robin", RoundRobin()), Loaded("stand-in", stand_in), Loaded("joining", joining)], ["round-robin"])
    with capture_logs() as logs:
        async with open_proxy(HeadraceSettings(), registry) as proxy:
            with pytest.raises(NoWorker, match="stand-in-0 is being started, stand-in-1 is being started"):
                proxy.preview(make_call())
            with trio.fail_after(60):
                await joining.joined.wait()
            await trio.to_thread.run_sync(wait_for, lambda: "stand_in.failed" in {entry["event"] for entry in logs}, 60)
            [worker] = proxy.fleet.workers
            assert not proxy.fleet.coming
    [failed] = [entry for entry in logs if entry["event"] == "stand_in.failed"]
    assert {worker, failed["worker"]} == {"stand-in-0", "stand-in-1"}
    assert failed["reason"] == "the stand-in worker ended with status 1 before it was ready"
