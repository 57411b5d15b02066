"""`hypercorn core.app`: the ASGI application. Settings are read when the server starts it, not when it is imported."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from core.proxy import open_proxy
from core.serving.application import Application
from core.serving.asgi import ASGIApp
from core.settings import Settings, load_settings


@asynccontextmanager
async def open_configured(settings: Settings | None = None) -> AsyncGenerator[ASGIApp, None]:
    """The proxy that the settings describe, as an ASGI application; by default those of `load_settings`.

    Raises: `SettingsError`.
    """
    async with open_proxy(settings or load_settings()) as proxy:
        yield proxy.asgi


app = Application(open_configured)
