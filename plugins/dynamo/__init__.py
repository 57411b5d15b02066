"""Dynamo's control plane: trainers that look for workers at a Dynamo frontend, and administer them by its routes, find the fleet.

Discovery names headrace as the one worker with all ranks, or each worker under an address that leads through headrace. Either way every
operation is the fleet's own: its gate, its quarantine and its journal see it.
"""

from collections.abc import Awaitable, Callable
from typing import Annotated, Literal
from urllib.parse import urlsplit

import structlog
from msgspec import Meta

from core import BadRequest, HTTPReply, HTTPRequest, PluginSettings, Proxy, Routes, hookimpl, serve_on_port
from plugins.dynamo.discovery import Discovery
from plugins.dynamo.engine import EngineRoutes

log = structlog.stdlib.get_logger()

DISCOVERY_PATH = "/v1/rl/workers"


class Settings(PluginSettings, frozen=True):
    """`[plugins.dynamo]`."""

    #: What discovery names: the whole fleet as one worker, at headrace's own origin; or each of the `workers`, under `/workers/<id>`.
    discovery: Literal["fleet", "workers"] = "fleet"
    #: headrace's address as trainers see it, `http://host:port`; by default the one at which they have asked.
    url: str = ""
    #: Serve discovery on this port of `[server] host`, too; trainers look at the one after headrace's own. Needs `url`.
    port: Annotated[int, Meta(ge=0, lt=65536)] = 0
    namespace: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]+$")] = "headrace"

    def __post_init__(self) -> None:
        if self.url:
            check_admin_url(self.url)
        if self.port and not self.url:
            raise ValueError("port: it needs url = 'http://HOST:PORT', where trainers find headrace itself")


class Dynamo:
    """The hooks."""

    settings_type = Settings

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._discovery: Discovery  # as soon as there is a proxy

    @hookimpl
    def register_routes(self, routes: Routes, proxy: Proxy) -> None:
        """See `core.hookspecs`."""
        engine = EngineRoutes(routes, proxy.administration)
        self._discovery = Discovery(proxy.fleet, engine, namespace=self._settings.namespace, each=self._settings.discovery == "workers")
        engine.add_to(routes)
        routes.add("GET", DISCOVERY_PATH, self.discover)

    @hookimpl
    def run_service(self, proxy: Proxy) -> Callable[[], Awaitable[None]] | None:
        """See `core.hookspecs`."""
        if not self._settings.port:
            return None
        routes = Routes(max_body_bytes=0)
        routes.add("GET", DISCOVERY_PATH, self.discover)
        service = serve_on_port(routes, host=proxy.settings.server.host, port=self._settings.port)
        log.info("dynamo.discovery", port=self._settings.port, url=self._settings.url)
        return service

    async def discover(self, request: HTTPRequest) -> HTTPReply:
        """Discovery. Cancellation: safe. Raises: `BadRequest` when nobody says what headrace's own address is."""
        url = self._settings.url or f"http://{request.headers.get('host', '')}"
        if url == "http://":
            raise BadRequest("host: the request names none, and [plugins.dynamo] url is not set")
        return HTTPReply.json(self._discovery.describe(url.rstrip("/")))


def check_admin_url(url: str) -> None:
    """Dynamo's rule for an `admin_base_url`. Raises: `ValueError`."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError(f"url: {url!r} is no address for trainers; write http://host:port, without user, query and fragment")
