import pytest

from core import proxy as proxy_module
from tests.unit.plugins.lora.fleet import lora_fleet


@pytest.fixture(autouse=True)
def _the_log_stays_as_it_is(monkeypatch):
    monkeypatch.setattr(proxy_module, "configure_log", lambda _: None)


@pytest.fixture
async def fleet(tmp_path):
    """Two workers without an adapter."""
    async with lora_fleet(tmp_path) as fleet:
        yield fleet
