"""The log: one event per line on stderr, structured. Never a prompt, a token list or a key."""

import logging
import sys
from typing import Any

import structlog

from core.settings import LogSettings


def configure_log(settings: LogSettings) -> None:
    """Set structlog up for this process."""
    renderers: dict[str, Any] = {
        "console": structlog.dev.ConsoleRenderer(),
        "json": structlog.processors.JSONRenderer(),
        "logfmt": structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"], bool_as_flag=False),
    }
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderers[settings.format],
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[settings.level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
