import pytest

from tests.unit.wire.peer import Network


@pytest.fixture
def network():
    return Network()
