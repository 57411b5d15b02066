"""OpenAI relay: chat, completions and their like, answered by a worker's own HTTP server.

Evaluations, judges and curious people speak OpenAI to a vLLM server. Here they get a fleet, with the bytes that one server would
have answered: headrace chooses the worker and reads no more than it must.
"""

from typing import Final

from core import Exchange, PluginSettings, Proxy, Routes, hookimpl
from plugins.openai_relay.usage import UsageReader

ROUTES: Final = (
    "/v1/chat/completions",
    "/v1/chat/completions/render",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/detokenize",
    "/tokenize",
)
#: Of these no KV comes: they are about text and tokens alone.
_TEXTS: Final = frozenset({"/v1/chat/completions/render", "/detokenize", "/tokenize"})


class Settings(PluginSettings, frozen=True):
    """`[plugins.openai-relay]`."""

    #: The paths that are relayed (POST). vLLM's Python server has more: `/pooling`, `/score`, `/rerank`, `/v1/messages`.
    routes: tuple[str, ...] = ROUTES

    def __post_init__(self) -> None:
        for route in self.routes:
            if not route.startswith("/") or "?" in route or "<" in route:
                raise ValueError(f"routes: {route!r} is not a path; write it as /v1/completions")
        if len(set(self.routes)) < len(self.routes):
            raise ValueError("routes: a path is there twice")


class OpenAIRelay:
    """Relays its routes."""

    settings_type = Settings

    def __init__(self, settings: Settings) -> None:
        self._routes = settings.routes

    @hookimpl
    def register_routes(self, routes: Routes, proxy: Proxy) -> None:
        """See `core.hookspecs`."""

        async def relay(exchange: Exchange) -> None:
            await proxy.relay(exchange, UsageReader(), touches_kv=exchange.request.path not in _TEXTS)

        for path in self._routes:
            routes.add_streamed("POST", path, relay)
