"""A whole proxy around workers whose adapters are in memory: they do what a script says."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import httpx
import trio
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from msgspec.structs import replace

from core.fleet.worker import Worker
from core.proxy import Proxy, open_proxy
from core.registry import Loaded, Registry
from core.settings import Settings as AllSettings
from core.wire.generated.vllm import (
    ListLorasResponse,
    LoadLoraRequest,
    LoadLoraResponse,
    LoraAdapter,
    UnloadLoraRequest,
    UnloadLoraResponse,
)
from plugins.lora import Lora, Settings
from plugins.routing_round_robin import RoundRobin
from tests.unit.core.lanes import ScriptedLane, output
from tests.unit.core.rig import make_worker


class Control:
    """The part of `vllm.Control` that is about adapters, of one worker."""

    def __init__(self) -> None:
        self.held: dict[str, str] = {}
        #: What was asked, in order: `("load", name)`, `("unload", name)`.
        self.asked: list[tuple[str, str]] = []
        #: What the next `load`, `unload` or `list` raises; once.
        self.failures: dict[str, list[Exception]] = {"load": [], "unload": [], "list": []}
        #: What `load`, `unload` or `list` waits for before it does anything.
        self.stalls: dict[str, trio.Event] = {}

    async def load_lora(self, request: LoadLoraRequest) -> LoadLoraResponse:
        await self._obey("load", request.lora_name)
        if request.lora_name in self.held:
            raise GRPCError(Status.ALREADY_EXISTS, f"LoRA adapter `{request.lora_name}` is already loaded")
        self.held[request.lora_name] = request.source_path
        return LoadLoraResponse()

    async def unload_lora(self, request: UnloadLoraRequest) -> UnloadLoraResponse:
        await self._obey("unload", request.lora_name)
        if request.lora_name not in self.held:
            raise GRPCError(Status.NOT_FOUND, f"LoRA adapter `{request.lora_name}` is not loaded")
        del self.held[request.lora_name]
        return UnloadLoraResponse()

    async def list_loras(self, request: object) -> ListLorasResponse:
        await self._obey("list", "")
        return ListLorasResponse(adapters=[LoraAdapter(lora_name=name, source_path=path) for name, path in sorted(self.held.items())])

    async def _obey(self, method: str, name: str) -> None:
        if name:
            self.asked.append((method, name))
        await trio.lowlevel.checkpoint()
        if (stall := self.stalls.get(method)) is not None:
            await stall.wait()
        if self.failures[method]:
            raise self.failures[method].pop(0)


def refused(message: str = "no such thing", status: Status = Status.INTERNAL) -> GRPCError:
    """What a worker answers when it doesn't do it."""
    return GRPCError(status, message)


class LoraFleet:
    """A proxy, its workers, and a client. A worker has one lane, and a `Control` of its own."""

    def __init__(self, proxy: Proxy, plugin: Lora, client: httpx.AsyncClient, folder: Path) -> None:
        self.proxy = proxy
        self.plugin = plugin
        self.client = client
        self.folder = folder
        self.workers: dict[str, Worker] = {}
        self.controls: dict[str, Control] = {}
        self.lanes: dict[str, ScriptedLane] = {}

    def add(self, name: str, *, control: Control | None = None, lora: bool = True, models: tuple[str, ...] = ("tiny",)) -> Worker:
        """A worker that was introduced, and has not joined yet."""
        self.lanes[name] = ScriptedLane([output(7, finish="stop")])
        self.controls[name] = control or Control()
        worker = make_worker(name, self.lanes[name], models=models, state="starting")
        assert worker.info
        worker.info = replace(worker.info, supports_lora=lora)
        worker.control = cast("Any", self.controls[name])
        self.workers[name] = self.proxy.fleet.workers[name] = worker
        return worker

    async def join(self, name: str, **options: Any) -> Worker:
        """A worker that is prepared, and then ready."""
        worker = self.add(name, **options)
        await self.proxy.registry.prepare(worker)
        self.move(name, "ready")
        return worker

    def move(self, name: str, state: Any) -> None:
        """What the fleet does when a probe says so."""
        self.proxy.fleet._set(self.workers[name], state, "in a test")

    def adapter(self, name: str, content: str = "weights") -> str:
        """The path of an adapter's folder."""
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        (folder / "adapter_config.json").write_text("{}")
        (folder / "adapter_model.safetensors").write_text(content)
        return str(folder)

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.client.post(path, json=body)

    async def load(self, name: str, path: str, **more: Any) -> httpx.Response:
        return await self.post("/v1/load_lora_adapter", lora_name=name, lora_path=path, **more)

    async def unload(self, name: str) -> httpx.Response:
        return await self.post("/v1/unload_lora_adapter", lora_name=name)

    async def generate(self, **fields: Any) -> httpx.Response:
        return await self.post("/inference/v1/generate", **{"token_ids": [1, 2, 3], "sampling_params": {}, **fields})

    @property
    def held(self) -> list[list[str]]:
        """What each worker holds."""
        return [sorted(control.held) for control in self.controls.values()]

    async def adapters(self) -> dict[str, dict[str, Any]]:
        """What `GET /v1/loras` shows, by name."""
        return {entry["lora_name"]: entry for entry in (await self.client.get("/v1/loras")).json()["loras"]}


@asynccontextmanager
async def lora_fleet(
    folder: Path, *, count: int = 2, plugins: dict[str, object] | None = None, **settings: Any
) -> AsyncIterator[LoraFleet]:
    """A fleet of `count` workers, `w0`, `w1`, …, in which adapters may lie in `folder`. `settings` are the plugin's."""
    plugin = Lora(Settings(**{"allowed_paths": [str(folder)], **settings}))
    named = {"lora": plugin, "round-robin": RoundRobin(), **(plugins or {})}
    registry = Registry([Loaded(name, each) for name, each in named.items()], ["round-robin"])
    async with (
        open_proxy(AllSettings(), registry) as proxy,
        httpx.AsyncClient(transport=httpx.ASGITransport(proxy.asgi), base_url="http://headrace") as client,
    ):
        fleet = LoraFleet(proxy, plugin, client, folder)
        for number in range(count):
            await fleet.join(f"w{number}")
        yield fleet


def message(response: httpx.Response) -> str:
    """The text of an error."""
    return json.loads(response.text)["error"]["message"]
