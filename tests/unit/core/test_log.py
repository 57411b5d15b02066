"""The log's lines."""

import pytest
import structlog

from core.log import configure_log
from core.settings import LogSettings


@pytest.fixture(autouse=True)
def _reset():
    yield
    structlog.reset_defaults()


def test_a_line_is_one_write_so_that_no_other_process_gets_between(monkeypatch):
    written = []

    class File:
        def write(self, text):
            written.append(text)

        def flush(self):
            pass

    monkeypatch.setattr("sys.stderr", File())
    configure_log(LogSettings(format="logfmt"))
    structlog.stdlib.get_logger().info("call.settled", route="kv: 4 of 6 blocks", ms=7)
    [line] = written
    assert line.endswith('level=info event=call.settled route="kv: 4 of 6 blocks" ms=7\n')
