"""The plugin in front of workers in memory, with plugin `prime-rl` beside it, and a `lora` that notes what it is asked."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import msgspec
from msgspec.structs import replace

from core.errors import CallError
from core.northbound.administration import add_administration_routes
from core.proxy import Proxy
from core.registry import Loaded, Registry
from core.routes import HTTPReply, HTTPRequest, Routes
from plugins.dynamo import Dynamo, Settings
from plugins.prime_rl import PrimeRL
from plugins.prime_rl import Settings as PrimeSettings
from tests.unit.core.engines import AdministeredFleet, administered, serve_http
from tests.unit.core.rig import Browser
from tests.unit.core.test_routes import ask

ABLE = {"supports_sleep": True, "weight_transfer_backend": "nccl", "supports_draft_updates": True, "supports_lora": True}


class DynamoFleet:
    """Workers of one and of three ranks. `sent` are the bodies of their `/collective_rpc`, `loras` those of `lora`'s routes."""

    def __init__(self, fleet: AdministeredFleet, settings: dict[str, Any], *, lora: bool) -> None:
        self.workers, self.engines = fleet.workers, fleet.engines
        self.administration = fleet.administration
        self.sent: list[list[Any]] = [serve_http(worker, {"results": [None] * worker.world_size}) for worker in fleet.workers]
        self.loras: list[Any] = []
        #: The adapters, and the models that they are for.
        self.loaded = {"b": "tiny", "a": "tiny"}
        #: What `lora` raises.
        self.fails: CallError | None = None
        self._routes = Routes(max_body_bytes=10_000)
        proxy = cast("Proxy", SimpleNamespace(fleet=fleet.rig.fleet, administration=fleet.administration))
        prime = PrimeRL(PrimeSettings())
        add_administration_routes(self._routes, fleet.administration, Registry([Loaded("prime-rl", prime)]))
        prime.register_routes(self._routes, proxy)
        Dynamo(Settings(**settings)).register_routes(self._routes, proxy)
        if lora:
            self._routes.add("POST", "/v1/load_lora_adapter", self._lora)
            self._routes.add("POST", "/v1/unload_lora_adapter", self._lora)
            self._routes.add("GET", "/v1/loras", self._lora)

    def enable(self, *workers: Any, **capabilities: Any) -> None:
        for worker in workers or self.workers:
            assert worker.info
            worker.info = replace(worker.info, **(capabilities or ABLE))

    async def post(self, path: str, body: Any = None) -> Browser:
        return await ask(
            self._routes, "POST", path, body if isinstance(body, bytes) else msgspec.json.encode(body) if body is not None else b""
        )

    async def answer(self, path: str, body: Any = None) -> tuple[int, Any]:
        browser = await self.post(path, body)
        return browser.status, browser.json

    async def get(self, path: str, headers: dict[str, str]) -> Browser:
        return await ask(self._routes, "GET", path, headers=headers)

    async def discover(self) -> list[dict[str, Any]]:
        told = (await self.get("/v1/rl/workers", headers={"host": "headrace:8000"})).json
        assert told["protocol_version"] == 1
        return told["workers"]

    async def _lora(self, request: HTTPRequest) -> HTTPReply:
        if self.fails:
            raise self.fails
        if request.method == "GET":
            return HTTPReply.json({"loras": [{"lora_name": name, "base_model": base} for name, base in self.loaded.items()]})
        self.loras.append(request.json())
        return HTTPReply(b"Success", content_type="text/plain")


@asynccontextmanager
async def dynamo(*, lora: bool = True, models: list[str] | None = None, **settings: Any) -> AsyncIterator[DynamoFleet]:
    """The fleet; `settings` are the plugin's."""
    async with administered(1, 3, models=models) as fleet:
        yield DynamoFleet(fleet, settings, lora=lora)
