"""The ASGI entry point: `hypercorn core.app`, or any other server with lifespan support.

Nothing is read and nothing starts at import. At startup the settings come from `$HEADRACE_CONFIG` and `$HEADRACE_WORKERS`, see
`core/settings.py`; where and how to listen is the server's own business.
"""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from core.serving.application import Application
from core.serving.asgi import ASGIApp


@asynccontextmanager
async def _open() -> AsyncGenerator[ASGIApp]:
    # Imported here, so that the server's parent process, which only looks for `app`, does not load the whole proxy.
    from core.proxy import open_proxy
    from core.settings import load_settings

    async with open_proxy(load_settings()) as proxy:
        yield proxy.asgi


app = Application(_open)
