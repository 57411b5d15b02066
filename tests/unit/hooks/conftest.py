"""A proxy around one plugin."""

import pytest

from core import proxy as proxy_module
from core.proxy import open_proxy
from core.registry import Loaded, Registry
from core.settings import Settings
from plugins.routing_round_robin import RoundRobin


@pytest.fixture
def opened(monkeypatch):
    """Opens a proxy without workers around one plugin; the log's set-up is the process's, so it stays as it is."""
    monkeypatch.setattr(proxy_module, "configure_log", lambda _: None)
    return lambda plugin: open_proxy(Settings(), Registry([Loaded("round-robin", RoundRobin()), Loaded("plugin", plugin)], ["round-robin"]))
