"""The ASGI entry point: `hypercorn core.app`, or any other server with lifespan support.

Nothing is read and nothing starts at import. At startup the settings come from `$HEADRACE_CONFIG` and `$HEADRACE_WORKERS`, see
`core/settings.py`; where and how to listen is the server's own business.
"""

from contextlib import AbstractAsyncContextManager

from core.proxy import open_asgi
from core.serving.application import Application
from core.serving.asgi import ASGIApp
from core.settings import load_settings


def _open() -> AbstractAsyncContextManager[ASGIApp]:
    return open_asgi(load_settings())


app = Application(_open)
